"""What DeRS keeps and holds: experts as one base and light deltas.

Shapes: a matrix of an FFN is [O, I]; D experts.
"""

import math
from collections.abc import Mapping

import torch

from upcycle_core.ders.config import CodecConfig
from upcycle_core.ders.decompose import MATRICES
from upcycle_core.planning.shape import Shape

FP32, FP64, INT64 = 4, 8, 8
COMPARED = FP32 + 2 * FP64
"""Bytes an entry while what was stored is held against what it stands for."""
TYPES: Mapping[int, torch.dtype] = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def compressed_bytes(shape: Shape, config: CodecConfig, experts: int) -> int:
    """Of the weight files.

    Args:
        shape: Of the dense model; its type is that of the MoE.
        config: How deltas are stored; a share of energy is taken for half of the ranks.
        experts: D.
    """
    outside = shape.mixture(experts) - experts * shape.ffns
    kept = sum(
        math.prod(matrix) * shape.itemsize + _deltas(matrix, shape, config, experts)
        for matrix in _matrices(shape).values()
    )
    return shape.itemsize * outside + shape.layers * kept


def compressing_bytes(shape: Shape, config: CodecConfig, experts: int) -> int:
    """Memory of storing: all deltas of a matrix, what they become, and how far that is off.

    Args:
        shape: As of ``compressed_bytes``.
        config: How deltas are stored.
        experts: D.
    """
    found = 0
    for matrix in _matrices(shape).values():
        entries, small = math.prod(matrix), min(matrix)
        encoded = _deltas(matrix, shape, config, experts)
        deltas = FP32 * experts * entries
        making = {
            "sparse": INT64 * entries + 2 * encoded // experts,
            "quantised": 4 * FP32 * entries,
            "low_rank": FP32 * (3 * entries + 4 * small**2),
        }[config.codec]
        comparing = encoded + COMPARED * entries
        found = max(found, deltas + max(encoded + max(making, encoded), comparing))
    return found


def _deltas(matrix: tuple[int, int], shape: Shape, config: CodecConfig, experts: int) -> int:
    from upcycle_core.ders.codec import codec_of  # imports models of transformers

    codec = codec_of(config, rank=min(matrix) // 2)
    layout = codec.layout(experts, matrix, TYPES[shape.itemsize])
    return sum(math.prod(sizes) * dtype.itemsize for sizes, dtype in layout.values())


def _matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    wide = (shape.inner, shape.hidden)
    return dict(zip(MATRICES, (wide, wide, wide[::-1]), strict=True))
