"""Quantised deltas: every entry, in few bits (DeRS, arXiv 2503.01359, section 3.3).

D deltas of a matrix [O, I], G groups of columns that share a scale, b bits an entry.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from upcycle_core.ders.codecs.codec import Codec, Key, Shape
from upcycle_core.ders.model.deltas_ders import offset


@dataclass(frozen=True, kw_only=True)
class QuantisedCodec(Codec):
    """Symmetric: integers -(2^(b-1) - 1) to 2^(b-1) - 1 times max|x| / (2^(b-1) - 1).

    With one bit, sign(x) (+ for 0) times mean|x|: of all multiples of the signs the nearest to x.
    An entry of 8, 4 or 2 bits is off by half a scale at most; integers are chosen for the scale as
    it is stored, which is rounded up.

    Args:
        bits_each: b: 8, 4, 2 or 1.
        group_size: Columns of a row that share a scale; all of them by default.
    """

    bits_each: int
    group_size: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        grouped = {} if self.group_size is None else {"group_size": self.group_size}
        return {"codec": "quantised", "bits": self.bits_each, **grouped}

    def encode(self, deltas_DOI: Tensor, *, dtype: torch.dtype, key: Key) -> dict[str, Tensor]:
        encoded = [self._encode_one(delta_OI, dtype) for delta_OI in deltas_DOI]
        codes, scales = zip(*encoded, strict=True)
        return {"codes": torch.stack(codes), "scales": torch.stack(scales)}

    def bits(self, deltas: int, shape: Shape, *, value_bits: int) -> int:
        outputs, inputs = shape
        groups = -(-inputs // (self.group_size or inputs))
        return deltas * outputs * (8 * -(-inputs * self.bits_each // 8) + groups * value_bits)

    def entries(self, deltas: int, shape: Shape) -> int:
        return deltas * shape[0] * shape[1]

    def _encode_one(self, delta_OI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs = delta_OI.shape[1]
        size = min(self.group_size or inputs, inputs)
        sizes_OI = delta_OI.abs()
        padded = functional.pad(sizes_OI, (0, -inputs % size)).unflatten(1, (-1, size))
        if self.bits_each == 1:
            counts_G = torch.full((padded.shape[1],), size)
            counts_G[-1] = inputs - size * (len(counts_G) - 1)
            scales_OG = (padded.sum(-1) / counts_G).to(dtype)
            return pack((delta_OI >= 0).to(torch.uint8), 1), scales_OG
        largest = offset(self.bits_each)
        scales_OG = _rounded_up(padded.amax(-1) / largest, dtype)
        wide_OI = scales_OG.to(delta_OI.dtype).repeat_interleave(size, 1)[:, :inputs]
        levels = (delta_OI / wide_OI.where(wide_OI > 0, 1)).round().clamp(-largest, largest)
        return pack((levels + largest).to(torch.uint8), self.bits_each), scales_OG


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """Pack codes little end first along a row; ``deltas_ders.unpack`` is the way back.

    Args:
        codes_OI: uint8, each less than 2^bits.
        bits: 8, 4, 2 or 1.

    Returns:
        uint8 [O, ceil(I bits / 8)].
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
