"""The model that most benchmarks run, and its tokenizer: some millions of parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from upcycle_core.architectures.families import family_of
from upcycle_core.checkpoints.writer import TensorSpec, write_json, write_sharded

VOCABULARY = 2048
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
"""Of a Llama; a Mixtral of it has ``EXPERTS``."""
EXPERTS = 4
SHARD = 1 << 30
"""Bytes of a file: each of these models lies in one."""


def llama_of(size: Mapping[str, int], **more: Any) -> LlamaConfig:
    """A Llama of one of the sizes that benchmarks name, its embeddings tied unless it says not."""
    return LlamaConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        vocab_size=size["vocabulary"],
        tie_word_embeddings=bool(size.get("tied", True)),
        max_position_embeddings=2048,
        **more,
    )


def write_llama(folder: Path, size: Mapping[str, int], *, seed: int, shard: int) -> None:
    """Write a Llama with random bf16 weights and a tokenizer; one tensor is held at a time.

    Args:
        folder: To make.
        size: One of those that benchmarks name.
        seed: Of the weights. They are drawn on a GPU, where there is one: other weights, sooner.
        shard: Bytes of a file.
    """
    config = llama_of(size, dtype="bfloat16", architectures=["LlamaForCausalLM"]).to_dict()
    family = family_of(config)
    specs = [TensorSpec(n, s, torch.bfloat16) for n, s in family.tensors(config).items()]
    shapes = {spec.name: spec.shape for spec in specs}
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def produce(name: str) -> torch.Tensor:
        weight = torch.ones(shapes[name], dtype=torch.bfloat16, device=device)
        return (weight if "norm" in name else weight.normal_(0, 0.02)).cpu()

    torch.manual_seed(seed)
    write_sharded(folder, specs, produce, max_shard_bytes=shard)
    write_json(folder / "config.json", config)
    save_word_tokenizer(folder, words=size["vocabulary"])


def save_word_tokenizer(folder: Path, *, words: int = VOCABULARY, end: str | None = "w0") -> None:
    """Write a tokenizer of the words w0, w1, ... into the directory of a model.

    Args:
        folder: The model's.
        words: How many there are.
        end: The one that ends a text.
    """
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end).save_pretrained(folder)
