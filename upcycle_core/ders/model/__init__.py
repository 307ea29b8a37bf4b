"""DeRS: importing this package makes transformers know the architecture."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from upcycle_core.ders.model.configuration_ders import DersConfig
from upcycle_core.ders.model.modeling_ders import DersForCausalLM, DersModel

AutoConfig.register(DersConfig.model_type, DersConfig)
AutoModel.register(DersConfig, DersModel)
AutoModelForCausalLM.register(DersConfig, DersForCausalLM)
# A saved model carries its code along, for whoever loads it without this package.
DersConfig.register_for_auto_class()
DersModel.register_for_auto_class("AutoModel")
DersForCausalLM.register_for_auto_class("AutoModelForCausalLM")
