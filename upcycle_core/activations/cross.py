"""Streaming cross-moments of two feature streams over the same rows, and how alike features are.

Shapes: T rows (tokens), I features of either stream; the first stream is x, the second y.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from upcycle_core.activations.moments import Accumulator, bf16_units

Kind = Literal["cosine", "correlation", "l2"]
# A feature whose variance is less than this share of its mean square does not tell rows apart.
CONSTANT = 1e-10
# On a CPU a batch is counted in blocks of at least this many numbers: copies that are much larger
# than its caches, or given back to the system after each, cost as much as the products.
BLOCK = 1 << 18


def batch_products(x_TI: Tensor, y_TI: Tensor) -> Tensor:
    """x^T y over one batch, in the features' own precision, as ``moments.add_gram``.

    Args:
        x_TI: fp32, fp64 or bf16 features.
        y_TI: The same rows of the other stream, in the same type; it may be of another width.

    Returns:
        [I, I]: fp64 for fp64 features, else fp32.
    """
    if x_TI.dtype != torch.bfloat16:
        return x_TI.T @ y_TI
    if x_TI.is_cuda:
        return torch.mm(x_TI.T, y_TI, out_dtype=torch.float32)
    with bf16_units():
        return x_TI.float().T @ y_TI.float()


def power_sums(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of x and of x^2 over one batch, in fp32 and yet exact enough to subtract.

    The variance of a feature that hardly varies is a small difference of the two. So what is summed
    in fp32 is d = x - m, where m is close to the mean; the rest is arithmetic in fp64:
    sum x = T m + sum d, sum x^2 = T m^2 + 2 m sum d + sum d^2.

    Args:
        x_TI: At least one row; fp64 features are summed in fp64.

    Returns:
        [I] and [I] fp64; not finite where a feature is not, or its square is beyond fp32.
    """
    rows, wide_TI = len(x_TI), x_TI.to(torch.promote_types(x_TI.dtype, torch.float32))
    near_I = wide_TI.mean(0)
    off_TI = wide_TI - near_I
    off_I, near_I = off_TI.sum(0).double(), near_I.double()
    squares_I = off_TI.square_().sum(0).double()
    return rows * near_I + off_I, (rows * near_I + 2 * off_I) * near_I + squares_I


class CrossMoments(Accumulator):
    """The accumulator: within a batch the features' own precision (fp32 for bf16), else fp64.

    Attributes:
        products: [I, I] fp64, sum x y^T.
        sums: [2, I] fp64, sum x and sum y.
        squares: [2, I] fp64, sum x^2 and sum y^2, feature by feature.
        count: [] int64, rows counted; on the CPU, which knows them without asking the device.
    """

    parts = ("products", "sums", "squares", "count")

    def __init__(self, size: int, *, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.products = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.sums = torch.zeros(2, size, dtype=torch.float64, device=device)
        self.squares = torch.zeros(2, size, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64)

    def update(
        self,
        x_TI: Tensor,
        y_TI: Tensor,
        *,
        rows: Tensor | None = None,
        second_rows: Tensor | None = None,
    ) -> None:
        """Count one batch.

        Args:
            x_TI: Features [..., I] of the first stream; leading dimensions are flattened.
            y_TI: Those of the second.
            rows: Which of the flattened rows count (int64); all of them by default. Left-out rows
                (padding) are never read, so they may hold anything.
            second_rows: The rows of the second stream that stand opposite, where they are others
                (two tokenizers); ``rows`` by default.

        Raises:
            ValueError: The streams do not have the same number of rows.
        """
        x_TI, y_TI = x_TI.reshape(-1, self.size), y_TI.reshape(-1, self.size)
        if rows is not None:
            x_TI = x_TI.index_select(0, rows)
            y_TI = y_TI.index_select(0, rows if second_rows is None else second_rows)
        if len(x_TI) != len(y_TI):
            raise ValueError(f"{len(x_TI)} rows of the first stream, {len(y_TI)} of the second")
        for block in self._blocks(x_TI, y_TI):
            self.products += batch_products(*block)
            for side, features in enumerate(block):
                sum_I, square_I = power_sums(features)
                self.sums[side] += sum_I
                self.squares[side] += square_I
        self.count += len(x_TI)

    def _blocks(self, x_TI: Tensor, y_TI: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Both streams in pieces that are cheap to copy, none without rows."""
        rows = max(BLOCK // self.size, self.size) if x_TI.device.type == "cpu" else len(x_TI)
        if len(x_TI):
            yield from zip(x_TI.split(rows), y_TI.split(rows), strict=True)

    def checked_rows(self) -> int:
        """Rows counted, at least one.

        Raises:
            ValueError: Nothing was counted, or either stream held a NaN or an infinity.
        """
        rows, finite = int(self.count), torch.isfinite(self.squares).all(1).tolist()
        if rows == 0 or not all(finite):
            raise ValueError(f"{rows} rows, finite: {finite}")
        return rows


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """How alike every feature of one stream is to every feature of the other.

    Args:
        matrix: [I, I] fp64, first by second, larger where more alike. Cosine and correlation of a
            dead feature are undefined and stand as zero.
        dead_first: [I] bool, features of the first stream without variance.
        dead_second: [I] bool, those of the second.
    """

    matrix: Tensor
    dead_first: Tensor
    dead_second: Tensor


def similarity(moments: CrossMoments, kind: Kind) -> Similarity:
    """Compare all features of two streams.

    Symphony-MoE's Eq. 2, min ||A_1 - A_i P||_F^2, is the assignment that maximises ``l2``; on
    columns of unit norm ("we perform normalization") it is ``cosine``, on standardised columns
    ``correlation``.

    Args:
        moments: Of at least one row.
        kind: ``l2`` is minus the squared distance of the two columns, divided by the rows.

    Raises:
        ValueError: Nothing was counted, or what was counted is not finite.
    """
    rows = moments.checked_rows()
    means, mean_squares = moments.sums / rows, moments.squares / rows
    variances = mean_squares - means.square()
    dead = variances <= CONSTANT * mean_squares
    matrix = moments.products / rows
    if kind == "l2":
        matrix.mul_(2).sub_(mean_squares[0][:, None]).sub_(mean_squares[1])
        return Similarity(matrix=matrix, dead_first=dead[0], dead_second=dead[1])
    scales = mean_squares
    if kind == "correlation":
        matrix.addr_(means[0], means[1], alpha=-1)
        scales = variances
    scales = scales.masked_fill(dead, torch.inf).rsqrt()
    matrix.mul_(scales[0][:, None]).mul_(scales[1]).clamp_(-1, 1)
    return Similarity(matrix=matrix, dead_first=dead[0], dead_second=dead[1])


def orthogonal_map(products_HH: Tensor) -> Tensor:
    """The orthogonal R that minimises sum ||x - y R||^2 over paired rows x and y.

    That is the R that maximises tr(R^T sum y x^T): U V^T of that sum's singular value
    decomposition (Schoenemann 1966).

    Args:
        products_HH: sum x y^T [.., H, H], as ``CrossMoments.products``; leading dimensions are
            problems of their own.

    Returns:
        [.., H, H] in the type given. Where the rows do not span all H directions the rest of R is
        orthogonal too, but arbitrary.
    """
    u, _, vt = torch.linalg.svd(products_HH.mT)
    return u @ vt
