"""The model that most benchmarks run, and its tokenizer: some millions of parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

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
    """A Llama with tied embeddings, of one of the sizes that benchmarks name."""
    return LlamaConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        vocab_size=size["vocabulary"],
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        **more,
    )


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
