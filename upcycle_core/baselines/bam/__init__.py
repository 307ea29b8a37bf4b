"""BAM: importing this package makes transformers know the architecture."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from upcycle_core.baselines.bam.modeling_bam import BamConfig, BamForCausalLM, BamModel

AutoConfig.register(BamConfig.model_type, BamConfig)
AutoModel.register(BamConfig, BamModel)
AutoModelForCausalLM.register(BamConfig, BamForCausalLM)
# A saved model carries its code along, for whoever loads it without this package.
BamConfig.register_for_auto_class()
BamModel.register_for_auto_class("AutoModel")
BamForCausalLM.register_for_auto_class("AutoModelForCausalLM")
