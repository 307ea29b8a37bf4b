"""Whether checkpoints come from one seed: seen at how far their attention weights lie apart."""

import math
from collections.abc import Mapping
from functools import partial

import torch

from upcycle_core.checkpoints.reader import CheckpointReader

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
APART = 1.0
"""Relative distance from which models are taken for strangers. Weights that share nothing are at
sqrt(2) = 1.41; fine-tuning moves attention by a tenth or two of its size."""


def distances(readers: Mapping[str, CheckpointReader]) -> dict[str, float]:
    """How far the attention weights of each checkpoint lie from the first one's.

    d = |a - b| / sqrt((|a|^2 + |b|^2) / 2), over all attention matrices of the middle layer: 0 for
    equal weights, sqrt(2) for weights that have nothing to do with each other.

    Args:
        readers: Checkpoints of one architecture and shape, by name.

    Returns:
        {name: d} of all but the first.
    """
    names = list(readers)
    if len(names) < 2:
        return {}
    layer = readers[names[0]].config["num_hidden_layers"] // 2
    first = readers[names[0]]

    def distance(other: CheckpointReader) -> float:
        return _distance(_attention(first, layer), _attention(other, layer))

    return {
        name: first.fact(f"distance {layer}", partial(distance, readers[name]), readers[name])
        for name in names[1:]
    }


def apart(readers: Mapping[str, CheckpointReader]) -> dict[str, float]:
    """Those of ``distances`` that are no fine-tuning's: of models that share no seed."""
    return {name: far for name, far in distances(readers).items() if far >= APART}


def _attention(reader: CheckpointReader, layer: int) -> list[torch.Tensor]:
    prefix = f"model.layers.{layer}.self_attn."
    return [reader.tensor(f"{prefix}{part}.weight").float() for part in ATTENTION]


def _distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    squares = [
        _square([a - b for a, b in zip(one, other, strict=True)]),
        *map(_square, (one, other)),
    ]
    return math.sqrt(squares[0] / max((squares[1] + squares[2]) / 2, 1e-30))


def _square(tensors: list[torch.Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)
