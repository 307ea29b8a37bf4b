"""Deltas of a matrix to the tensors of a file, and back (DeRS, arXiv 2503.01359, section 3.3).

D deltas of a matrix [O, I]: O output size, I input size. b bits a quantised entry, G groups of
columns that share a scale, r rank.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from upcycle_core.ders.config import CodecConfig
from upcycle_core.ders.model.deltas_ders import (
    Delta,
    index_dtype,
    kept_entries,
    make_delta,
    offset,
)
from upcycle_core.moe.random import keyed_generator

Shape = tuple[int, int]
"""[O, I] of a matrix."""
Key = tuple[int | str, ...]
"""What random choices depend on, and on nothing else: (seed, layer, matrix)."""
_STORED = {"sparse": ("drop_rate",), "quantised": ("bits", "group_size"), "low_rank": ("rank",)}


@dataclass(frozen=True)
class Codec:
    """A way to store deltas.

    How tensors are laid out and what they mean is said once, by the module that the model computes
    with (``deltas_ders``); a codec fills them.

    Args:
        config: Without faults; ``low_rank`` says its rank.
    """

    config: CodecConfig

    @property
    def settings(self) -> dict[str, Any]:
        """What config.json says of it: ``codec`` and the settings that its tensors depend on."""
        stored = {name: getattr(self.config, name) for name in _STORED[self.config.codec]}
        given = {name: value for name, value in stored.items() if value is not None}
        return {"codec": self.config.codec, **given}

    def encode(self, deltas_DOI: Tensor, *, dtype: torch.dtype, key: Key) -> dict[str, Tensor]:
        """Return the tensors that stand for ``deltas_DOI``, as ``layout`` has them.

        Args:
            deltas_DOI: fp32 or fp64, one delta an expert.
            dtype: Type of what is stored as floating point.
            key: Decides what is drawn, with the expert's place.
        """
        encode = {"sparse": _sparse, "quantised": _quantised, "low_rank": _low_rank}
        encoded = [
            encode[self.config.codec](delta_OI, self.config, dtype, (*key, expert))
            for expert, delta_OI in enumerate(deltas_DOI)
        ]
        return {name: torch.stack([parts[name] for parts in encoded]) for name in encoded[0]}

    def entries(self, deltas: int, shape: Shape) -> int:
        """Numbers that are stored of the deltas themselves: no indices, no scales."""
        if self.config.codec == "quantised":
            return deltas * math.prod(shape)
        layout = self.layout(deltas, shape, torch.float32).values()
        return sum(math.prod(sizes) for sizes, dtype in layout if dtype.is_floating_point)

    def layout(
        self, deltas: int, shape: Shape, dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name to shape and type of every tensor, in the order they are written."""
        return {
            name: (tuple(tensor.shape), dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self._module(deltas, shape).state_dict().items()
        }

    def decode(self, tensors: Mapping[str, Tensor], shape: Shape, expert: int) -> Tensor:
        """Return one delta [O, I], in fp32, or fp64 if that is what is stored.

        Args:
            tensors: What ``encode`` returned, or a file holds.
            shape: [O, I].
            expert: Which of the D deltas.
        """
        own = {name: _exact(tensor[expert : expert + 1]) for name, tensor in tensors.items()}
        module = self._module(1, shape)
        module.load_state_dict(own, assign=True)
        with torch.no_grad():
            return module.dense(0)

    def _module(self, deltas: int, shape: Shape) -> Delta:
        """The module that reads the tensors, without storage."""
        with torch.device("meta"):
            return make_delta(deltas, *shape, bias=False, **self.settings)


def codec_of(config: CodecConfig, *, rank: int | None = None) -> Codec:
    """Return what ``config`` asks for.

    Args:
        config: Without faults.
        rank: r where ``config`` gives a share of energy instead.
    """
    chosen = rank if config.rank is None else config.rank
    return Codec(replace(config, rank=chosen) if config.codec == "low_rank" else config)


def stored_codec(delta: Mapping[str, Any], layer: int, matrix: str) -> Codec:
    """Return the codec of one matrix, from config.json's ``delta``."""
    settings = {name: value for name, value in delta.items() if name != "ranks"}
    rank = (delta.get("ranks") or {}).get(f"{layer}.{matrix}", settings.get("rank"))
    return Codec(CodecConfig(**{**settings, "rank": rank}))


def ffn_bits(
    matrices: Mapping[str, tuple[int, int]],
    deltas: int,
    config: CodecConfig,
    *,
    value_bits: int,
    ranks: Mapping[str, int],
) -> float:
    """Size of the FFN of one layer in bits, by the paper's formulas and what they leave out.

    F entries of one FFN (all its matrices), K bits of a weight, p drop rate:

        sparse      K F + D (1 - p) F K         + D (1 - p) F j      of indices of j bits
        quantised   K F + D b F                 + D K sum O ceil(I / g)  of scales, g columns each
        low rank    K F + D r K sum (O + I)

    The paper (section 3.3) counts the first two columns, as 1 + N (1 - p) FFNs, and K + N b bits.
    Not whole where the formula is not.

    Args:
        matrices: Name to [O, I] of the FFN's matrices.
        deltas: D: N experts, and one for a universal FFN that is stored as a delta.
        config: How deltas are stored; without faults.
        value_bits: K.
        ranks: Matrix to rank, where ``config`` gives a share of energy; else empty.
    """
    shapes = list(matrices.values())
    entries = sum(o * i for o, i in shapes)
    if config.codec == "sparse":
        assert config.drop_rate is not None
        kept = deltas * (1 - config.drop_rate)
        indices = sum(kept * 8 * index_dtype(o * i).itemsize * o * i for o, i in shapes)
        return value_bits * entries + kept * value_bits * entries + indices
    if config.codec == "quantised":
        assert config.bits is not None
        groups = sum(o * -(-i // (config.group_size or i)) for o, i in shapes)
        return value_bits * entries + deltas * (config.bits * entries + value_bits * groups)
    rank_of = ranks or dict.fromkeys(matrices, config.rank or 0)
    sides = sum(rank_of[name] * (o + i) for name, (o, i) in matrices.items())
    return value_bits * (entries + deltas * sides)


def rank_of_energy(delta_OI: Tensor, energy: float) -> int:
    """The least rank, 1 or more, that keeps a share of the squared singular values' sum."""
    squares = torch.linalg.svdvals(delta_OI).double().square()
    kept = squares.cumsum(0)
    return 1 + int((kept < energy * kept[-1]).sum())


def _sparse(
    delta_OI: Tensor, config: CodecConfig, dtype: torch.dtype, key: Key
) -> dict[str, Tensor]:
    """(1 - M) * delta / (1 - p): n = max(1, round((1 - p) O I)) entries, an exact count.

    Drawn without replacement, or the largest (of equal ones the first).
    """
    assert config.drop_rate is not None
    flat = delta_OI.flatten()
    count = kept_entries(len(flat), config.drop_rate)
    if config.keep == "magnitude":
        sizes = flat.abs()
        least = sizes.kthvalue(len(flat) - count + 1).values
        kept = sizes > least
        equal = (sizes == least).nonzero().flatten()
        kept[equal[: count - int(kept.sum())]] = True
        places = kept.nonzero().flatten()
    else:
        places = drawn_places(len(flat), count, key)
    factor = 1 if config.rescale is False else 1 / (1 - config.drop_rate)
    return {
        "values": (factor * flat[places]).to(dtype),
        "indices": places.to(index_dtype(len(flat))),
    }


def drawn_places(size: int, count: int, key: Key) -> Tensor:
    """``count`` of the places 0 .. ``size`` - 1, ascending, int64."""
    return torch.randperm(size, generator=keyed_generator(*key))[:count].sort().values


def _low_rank(
    delta_OI: Tensor, config: CodecConfig, dtype: torch.dtype, key: Key
) -> dict[str, Tensor]:
    """delta = U S V^T, of which b = U S^(1/2) [O, r] and a = S^(1/2) V^T [r, I] are kept.

    Ours: the paper only trains this form. Nothing of rank r is nearer to delta (Eckart and Young):
    its squared error is the sum of the squared singular values that are left out.
    """
    u_OR, s_R, v_RI = torch.linalg.svd(delta_OI, full_matrices=False)
    root_R = s_R[: config.rank].sqrt()
    return {
        "a": (root_R[:, None] * v_RI[: config.rank]).to(dtype),
        "b": (u_OR[:, : config.rank] * root_R).to(dtype),
    }


def _quantised(
    delta_OI: Tensor, config: CodecConfig, dtype: torch.dtype, key: Key
) -> dict[str, Tensor]:
    """Symmetric: integers -(2^(b-1) - 1) to 2^(b-1) - 1 times max|x| / (2^(b-1) - 1).

    With one bit, sign(x) (+ for 0) times mean|x|: of all multiples of the signs the nearest to x.
    An entry of 8, 4 or 2 bits is off by half a scale at most; integers are chosen for the scale as
    it is stored, which is rounded up. A row is one group by default.
    """
    assert config.bits is not None
    inputs = delta_OI.shape[1]
    size = min(config.group_size or inputs, inputs)
    sizes_OI = delta_OI.abs()
    padded = functional.pad(sizes_OI, (0, -inputs % size)).unflatten(1, (-1, size))
    if config.bits == 1:
        counts_G = torch.full((padded.shape[1],), size)
        counts_G[-1] = inputs - size * (len(counts_G) - 1)
        scales_OG = (padded.sum(-1) / counts_G).to(dtype)
        return {"codes": _packed((delta_OI >= 0).to(torch.uint8), 1), "scales": scales_OG}
    largest = offset(config.bits)
    scales_OG = _rounded_up(padded.amax(-1) / largest, dtype)
    wide_OI = scales_OG.to(delta_OI.dtype).repeat_interleave(size, 1)[:, :inputs]
    levels = (delta_OI / wide_OI.where(wide_OI > 0, 1)).round().clamp(-largest, largest)
    codes_OB = _packed((levels + largest).to(torch.uint8), config.bits)
    return {"codes": codes_OB, "scales": scales_OG}


def _packed(codes_OI: Tensor, bits: int) -> Tensor:
    """Codes less than 2^bits, packed little end first along a row: uint8 [O, ceil(I bits / 8)].

    ``deltas_ders.unpack`` is the way back.
    """
    each = 8 // bits
    codes = functional.pad(codes_OI, (0, -codes_OI.shape[1] % each)).unflatten(1, (-1, each))
    packed = torch.zeros_like(codes[..., 0])
    for place in range(each):
        packed |= codes[..., place] << (bits * place)
    return packed


def _rounded_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The least of ``dtype`` that is not less: the largest entry then needs no larger integer."""
    rounded = values.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return rounded.where(rounded.to(values.dtype) >= values, above)


def _exact(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
