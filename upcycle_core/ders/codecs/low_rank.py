"""Low-rank deltas: a truncated singular value decomposition. Ours: the paper only trains this form.

D deltas of a matrix [O, I], r rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upcycle_core.ders.codecs.codec import Codec, Key, Shape


@dataclass(frozen=True, kw_only=True)
class LowRankCodec(Codec):
    """delta = U S V^T, of which b = U S^(1/2) [O, r] and a = S^(1/2) V^T [r, I] are kept.

    Nothing of rank r is nearer to delta (Eckart and Young): its squared error is the sum of the
    squared singular values that are left out.

    Args:
        rank: r, at most the smaller side.
    """

    rank: int

    @property
    def settings(self) -> dict[str, Any]:
        return {"codec": "low_rank", "rank": self.rank}

    def encode(self, deltas_DOI: Tensor, *, dtype: torch.dtype, key: Key) -> dict[str, Tensor]:
        a, b = [], []
        for delta_OI in deltas_DOI:
            u_OR, s_R, v_RI = torch.linalg.svd(delta_OI, full_matrices=False)
            root_R = s_R[: self.rank].sqrt()
            a.append((root_R[:, None] * v_RI[: self.rank]).to(dtype))
            b.append((u_OR[:, : self.rank] * root_R).to(dtype))
        return {"a": torch.stack(a), "b": torch.stack(b)}

    def bits(self, deltas: int, shape: Shape, *, value_bits: int) -> int:
        return self.entries(deltas, shape) * value_bits

    def entries(self, deltas: int, shape: Shape) -> int:
        return deltas * self.rank * (shape[0] + shape[1])


def rank_of_energy(delta_OI: Tensor, energy: float) -> int:
    """The least rank, 1 or more, that keeps a share of the squared singular values' sum."""
    squares = torch.linalg.svdvals(delta_OI).double().square()
    kept = squares.cumsum(0)
    return 1 + int((kept < energy * kept[-1]).sum())
