"""The plain way of ``benchmarks.assembly``: everything in memory; and the models to join."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

from benchmarks.assembly_streamed import NAMES, random_router
from benchmarks.models import save_word_tokenizer
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.checkpoints.writer import TensorSpec, write_sharded


def make_models(folder: Path, shape: Mapping[str, int]) -> None:
    """Two random Llamas in bf16, with a tokenizer of as many words."""
    family = FAMILIES["llama"]
    for seed, name in enumerate(NAMES):
        config = LlamaConfig.from_dict(
            {**shape, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        )
        config.save_pretrained(folder / name)
        torch.manual_seed(seed)
        tensors = family.tensors(config.to_dict())
        specs = [TensorSpec(key, size, torch.bfloat16) for key, size in tensors.items()]

        def produce(key: str, tensors: Mapping = tensors) -> torch.Tensor:
            return (0.02 * torch.randn(tensors[key])).to(torch.bfloat16)

        write_sharded(folder / name, specs, produce, max_shard_bytes=10**10)
        save_word_tokenizer(folder / name, words=shape["vocab_size"])


def run(folder: Path, out: Path, *, max_shard_bytes: int) -> None:
    """The plain way: both models in memory, the MoE in memory, then ``save_pretrained``."""
    dense = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16) for name in NAMES
    ]
    states = [model.state_dict() for model in dense]
    config = json.loads((folder / NAMES[0] / "config.json").read_text())
    target = FAMILIES["llama"].target_config(config, experts=len(NAMES), top_k=1)
    moe = MixtralForCausalLM._from_config(MixtralConfig(**target), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            parameter.copy_(_part(name, states, config))
    moe.save_pretrained(out, max_shard_size=max_shard_bytes)
    AutoTokenizer.from_pretrained(folder / NAMES[0]).save_pretrained(out)


def _part(name: str, states: list[dict[str, torch.Tensor]], config: Mapping) -> torch.Tensor:
    """One fused parameter of the MoE, from whole state dictionaries."""
    prefix = name.split(".experts.")[0]
    if name.endswith("experts.gate_up_proj"):
        gates = [state[f"{prefix}.gate_proj.weight"] for state in states]
        ups = [state[f"{prefix}.up_proj.weight"] for state in states]
        return torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    if name.endswith("experts.down_proj"):
        return torch.stack([state[f"{prefix}.down_proj.weight"] for state in states])
    if name.endswith("mlp.gate.weight"):
        return random_router(config, int(name.split(".")[2])).T
    return torch.stack([state[name].float() for state in states]).mean(dim=0)
