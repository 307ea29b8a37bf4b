"""How many sequences fit the memory, from the model's shape: nothing is tried until it fails."""

from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from upcycle_core.checkpoints.divided import AUTO
from upcycle_core.memory import free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 64
POSITIONS = 4096
"""Prompts of common tasks are no longer; the share leaves room for one four times as long."""
SHARE = 0.25
"""Of the free memory: several pieces may share a machine."""
LOGITS_COPIES = 3
"""The logits, their log-softmax and a copy in fp32."""


def fitting_batch_size(model: "PreTrainedModel", device: str) -> int:
    """A power of two of sequences of the model's full length, or of 4096 positions, 1 to 64.

    Counts what grows with the batch: logits, keys and values, and the widest layer.
    """
    config = model.config
    size = model.dtype.itemsize
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head * size
    wide = 4 * (config.hidden_size + _width(config)) * size
    logits = LOGITS_COPIES * config.vocab_size * max(size, 4)
    sequence = min(config.max_position_embeddings, POSITIONS) * (logits + cache + wide)
    fitting = int(SHARE * free_on(device) / sequence)
    return max(1, min(LARGEST, 1 << max(0, fitting.bit_length() - 1)))


def _width(config: PretrainedConfig) -> int:
    """MLP units that one position goes through: those of all its experts."""
    expert = getattr(config, "moe_intermediate_size", config.intermediate_size)
    experts = getattr(config, "num_experts_per_tok", 0) * expert
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    return max(config.intermediate_size, experts + shared)


def free_on(device: str) -> int:
    """Bytes that are free where the model runs; of several GPUs, on the one that has the least."""
    if device == "cpu":
        return free_memory()
    places = range(torch.cuda.device_count()) if device == AUTO else [device]
    return min(torch.cuda.mem_get_info(place)[0] for place in places)
