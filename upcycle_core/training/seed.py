"""A small model with random weights: the seed that all experts start from, or a stranger's own."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.checkpoints.tokenizer import copy_tokenizer, load_tokenizer
from upcycle_core.errors import raise_faults
from upcycle_core.training.checks import shape_faults
from upcycle_core.training.config import LlamaShape


def initialise_model(shape: LlamaShape, tokenizer: Path, out: Path, *, seed: int) -> None:
    """Write a random model as an ordinary fp32 checkpoint; the same arguments give the same bytes.

    Args:
        shape: Its family and sizes. The vocabulary is the tokenizer's.
        tokenizer: Directory of the tokenizer, copied into ``out``.
        out: Directory to write.
        seed: Seed of the weights. The caller's random state is left as it was.

    Raises:
        InputError: The sizes do not fit each other.
    """
    raise_faults(shape_faults(shape, "shape"))
    words = load_tokenizer(tokenizer)
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=len(words),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.attention_heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.hidden_size // shape.attention_heads,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        dtype=torch.float32,
    )
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    with quiet_loading():
        model.save_pretrained(out)
    copy_tokenizer(tokenizer, out)
