"""Sparse deltas: few entries, and where they are (DeRS, arXiv 2503.01359, section 3.3).

D deltas of a matrix [O, I], n entries kept of each.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from upcycle_core.ders.codecs.codec import Codec, Key, Shape
from upcycle_core.ders.model.deltas_ders import index_dtype, kept_entries
from upcycle_core.moe.random import keyed_generator


@dataclass(frozen=True, kw_only=True)
class SparseCodec(Codec):
    """(1 - M) * delta / (1 - p): n = max(1, round((1 - p) O I)) entries, an exact count.

    Args:
        drop_rate: p, in [0, 1).
        keep: Entries that are kept: drawn without replacement, or the largest (of equal ones the
            first).
        rescale: Whether they are multiplied by 1 / (1 - p).
    """

    drop_rate: float
    keep: Literal["random", "magnitude"] = "random"
    rescale: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        return {"codec": "sparse", "drop_rate": self.drop_rate}

    def encode(self, deltas_DOI: Tensor, *, dtype: torch.dtype, key: Key) -> dict[str, Tensor]:
        flat = deltas_DOI.flatten(1)
        count = kept_entries(flat.shape[1], self.drop_rate)
        places = [self._places(row, count, (*key, expert)) for expert, row in enumerate(flat)]
        values = [row[own] for row, own in zip(flat, places, strict=True)]
        factor = 1 / (1 - self.drop_rate) if self.rescale else 1
        kind = index_dtype(flat.shape[1])
        return {
            "values": torch.stack([(factor * own).to(dtype) for own in values]),
            "indices": torch.stack([own.to(kind) for own in places]),
        }

    def bits(self, deltas: int, shape: Shape, *, value_bits: int) -> int:
        index_bits = 8 * index_dtype(shape[0] * shape[1]).itemsize
        return self.entries(deltas, shape) * (value_bits + index_bits)

    def entries(self, deltas: int, shape: Shape) -> int:
        return deltas * kept_entries(shape[0] * shape[1], self.drop_rate)

    def _places(self, row: Tensor, count: int, key: Key) -> Tensor:
        """Flat positions that are kept, ascending, int64."""
        if self.keep == "random":
            generator = keyed_generator(*key)
            return torch.randperm(len(row), generator=generator)[:count].sort().values
        sizes = row.abs()
        least = sizes.kthvalue(len(row) - count + 1).values
        kept = sizes > least
        equal = (sizes == least).nonzero().flatten()
        kept[equal[: count - int(kept.sum())]] = True
        return kept.nonzero().flatten()
