"""Copies of a MoE in which one thing is changed on purpose: what a reader says must change too."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from upcycle_core.architectures.dense_of import TARGETS
from upcycle_core.architectures.family import Target
from upcycle_core.checkpoints.reader import INDEX_FILE, CheckpointReader
from upcycle_core.checkpoints.writer import TensorSpec, write_sharded
from upcycle_core.errors import Fault, InputError

Change = Literal["exchanged", "zeroed"]
SHARD_BYTES = 5 * 10**9


def change(source: Path, out: Path, how: Change) -> None:
    """Copy a checkpoint, or the files of a registered version, with one change in every layer.

    Args:
        source: A stock MoE.
        out: A directory that is not there.
        how: ``exchanged``: the first two experts in each other's place; ``zeroed``: routers of
            zeros.

    Raises:
        InputError: It is no stock MoE.
    """
    checkpoint = CheckpointReader(source)
    target = target_of(checkpoint.config)
    layers = checkpoint.config["num_hidden_layers"]
    taken = _exchanged(target, layers) if how == "exchanged" else {}
    zeros = {target.router_name(layer) for layer in range(layers)} if how == "zeroed" else set()

    def produce(name: str) -> torch.Tensor:
        tensor = checkpoint.tensor(taken.get(name, name))
        return torch.zeros_like(tensor) if name in zeros else tensor

    specs = [TensorSpec(name, i.shape, i.dtype) for name, i in checkpoint.tensors.items()]
    ignored = shutil.ignore_patterns("*.safetensors", INDEX_FILE)
    shutil.copytree(source, out, ignore=ignored)
    write_sharded(out, specs, produce, max_shard_bytes=SHARD_BYTES)


def target_of(config: Mapping) -> Target:
    """The stock MoE architecture that config.json names.

    Raises:
        InputError: Another one.
    """
    model_type = config.get("model_type")
    if model_type not in TARGETS:
        remedy = f"is no stock MoE; choose a model of {', '.join(TARGETS)}"
        raise InputError(Fault("model_type", model_type, remedy))
    return TARGETS[model_type]


def _exchanged(target: Target, layers: int) -> Mapping[str, str]:
    """Each matrix of the first two experts to that of the other."""
    pairs: dict[str, str] = {}
    for layer in range(layers):
        first, second = target.expert_ffn(layer, 0), target.expert_ffn(layer, 1)
        pairs |= dict(zip((*first, *second), (*second, *first), strict=True))
    return pairs
