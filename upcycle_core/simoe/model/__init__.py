"""SIMoE: importing this package makes transformers know the architecture."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from upcycle_core.simoe.model.configuration_simoe import SimoeConfig
from upcycle_core.simoe.model.modeling_simoe import SimoeForCausalLM, gated_modules
from upcycle_core.simoe.model.seq2seq_simoe import SimoeForConditionalGeneration

__all__ = ["SimoeConfig", "SimoeForCausalLM", "SimoeForConditionalGeneration", "gated_modules"]

AutoConfig.register(SimoeConfig.model_type, SimoeConfig)
AutoModelForCausalLM.register(SimoeConfig, SimoeForCausalLM)
AutoModelForSeq2SeqLM.register(SimoeConfig, SimoeForConditionalGeneration)
# A saved model carries its code along, for whoever loads it without this package.
SimoeConfig.register_for_auto_class()
SimoeForCausalLM.register_for_auto_class("AutoModelForCausalLM")
SimoeForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
