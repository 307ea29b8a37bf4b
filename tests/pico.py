"""Tiny random checkpoints that go through everything in seconds."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "olmo2": Olmo2Config,
    "ernie4_5": Ernie4_5Config,
}
VOCABULARY = 96
_made: dict[str, tuple[Path, torch.Tensor]] = {}


def pico_config(family: str = "llama", **overrides) -> PretrainedConfig:
    """A 2-layer configuration of ``family``: H=32, I=48, V=96, 4 heads, 2 key-value heads."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    if family == "mistral":
        shape["sliding_window"] = None
    return CONFIGS[family](**{**shape, **overrides})


def save_pico_tokenizer(directory: Path, size: int = VOCABULARY) -> Path:
    """A word-level tokenizer of ``size`` printable one-character tokens."""
    words = ["<|endoftext|>", "<|pad|>", *(chr(32 + i) for i in range(size - 2))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
    ).save_pretrained(directory)
    return directory


def save_pico(directory: Path, family: str = "llama", *, seed: int = 0, **overrides) -> Path:
    """Write a random checkpoint with its tokenizer; large weights tell models apart.

    What was written once is copied after that, and torch's CPU generator is where it was then.
    """
    key = f"{family} {seed} {sorted(overrides.items())}"
    if key not in _made:
        made = _save_pico(Path(tempfile.mkdtemp()), family, seed, overrides)
        _made[key] = made, torch.get_rng_state()
    made, state = _made[key]
    torch.set_rng_state(state)
    return shutil.copytree(made, directory, copy_function=shutil.copyfile, dirs_exist_ok=True)


def _save_pico(directory: Path, family: str, seed: int, overrides: dict[str, Any]) -> Path:
    torch.manual_seed(seed)
    config = pico_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.05 if "norm" in name else 0.2
            offset = 1.0 if "norm" in name else 0.0
            parameter.copy_(offset + scale * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return save_pico_tokenizer(directory, config.vocab_size)
