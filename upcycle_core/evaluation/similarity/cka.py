"""How alike N streams of features are over the same rows: linear CKA and matched neurons.

Nothing is kept per row. Shapes: T rows (tokens), I features of every stream, N streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from upcycle_core.activations.cross import CONSTANT, CrossMoments, similarity
from upcycle_core.activations.moments import Moments


class StreamMoments:
    """The accumulator: N Gram matrices and the N (N - 1) / 2 cross products of N streams.

    It holds N I (I + 1) / 2 + N (N - 1) / 2 I^2 fp64 numbers, about 4 N^2 I^2 bytes: 5.1 GB for
    four streams of 8960 features. ``compare`` adds three matrices of I^2 while it runs.

    Attributes:
        grams: [N], sum x x^T of each stream.
        cross: {(first, second): sum x y^T} of every two streams, first < second.
    """

    def __init__(self, streams: int, size: int, *, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.grams = [Moments(size, device=device) for _ in range(streams)]
        self.cross = {
            pair: CrossMoments(size, device=device) for pair in combinations(range(streams), 2)
        }

    def update(self, streams: Sequence[Tensor]) -> None:
        """Count one batch.

        Args:
            streams: N tensors [T, I] in fp32, fp64 or bf16; row t of each is the same position.

        Raises:
            ValueError: Not N streams, or not the same number of rows in each.
        """
        if len({len(x_TI) for x_TI in streams}) > 1:
            raise ValueError(f"streams of {[len(x_TI) for x_TI in streams]} rows")
        for gram, x_TI in zip(self.grams, streams, strict=True):
            gram.update(x_TI)
        for (first, second), cross in self.cross.items():
            cross.update(streams[first], streams[second])

    @property
    def rows(self) -> int:
        """Rows counted."""
        return self.grams[0].count()

    def non_finite(self) -> list[int]:
        """The streams that held a NaN or an infinity."""
        return [
            stream for stream, gram in enumerate(self.grams) if not torch.isfinite(gram.sums).all()
        ]


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How alike two streams are.

    Args:
        cka: Linear CKA, 0 to 1; None where a stream has no variance at all.
        matched: Mean over j of the correlation of feature j of one with feature j of the other, -1
            to 1. A constant feature correlates with nothing: 0.
        best: The largest mean that any one-to-one matching of features reaches (so many that stand
            opposite each other are the same feature): ``matched`` after the best permutation.
            None where it was not asked for.
        constant_first: Features of the first stream without variance.
        constant_second: Those of the second.
    """

    cka: float | None
    matched: float
    best: float | None
    constant_first: int
    constant_second: int


def compare(moments: StreamMoments, *, best: bool = True) -> dict[tuple[int, int], Likeness]:
    """Compare every two streams.

    Args:
        moments: Of at least one row, all finite.
        best: Whether the best matching is found: O(I^3) for every pair.

    Returns:
        {(first, second): their likeness}, first < second.

    Raises:
        ValueError: Nothing was counted, or what was counted is not finite.
    """
    if not moments.rows or moments.non_finite():
        raise ValueError(f"{moments.rows} rows, not finite: streams {moments.non_finite()}")
    norms = [
        float(_centred(gram.gram(), gram.sum(), gram.sum(), gram.count()).norm())
        for gram in moments.grams
    ]
    found = {}
    for (first, second), cross in moments.cross.items():
        correlation = similarity(cross, "correlation")
        found[first, second] = Likeness(
            cka=_linear_cka(cross, norms[first] * norms[second]),
            matched=float(correlation.matrix.diagonal().mean()),
            best=_best_mean(correlation.matrix) if best else None,
            constant_first=int(correlation.dead_first.sum()),
            constant_second=int(correlation.dead_second.sum()),
        )
    return found


def _linear_cka(cross: CrossMoments, norms: float) -> float | None:
    """Linear CKA = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of centred X and Y [T, I].

    Kornblith et al. 2019 (Cortes et al. 2012 for kernels). Every norm stays what it is when
    the columns of X are permuted or rotated: CKA cannot tell a model from a permuted copy of it.
    ``norms`` is the denominator. None where X or Y has no variance.
    """
    rows = int(cross.count)
    mean_squares = cross.squares.sum(1) / rows
    variances = mean_squares - (cross.sums / rows).square().sum(1)
    if bool((variances <= CONSTANT * mean_squares).any()):
        return None
    centred = _centred(cross.products.clone(), cross.sums[0], cross.sums[1], rows)
    return float(centred.norm().square()) / norms


def _best_mean(matrix_II: Tensor) -> float:
    matrix_II = matrix_II.cpu()
    rows, columns = linear_sum_assignment(matrix_II.numpy(), maximize=True)
    return float(matrix_II[rows, columns].mean())


def _centred(products: Tensor, first_sum: Tensor, second_sum: Tensor, rows: int) -> Tensor:
    """sum x y^T of features less their means, in the memory of ``products``."""
    return products.addr_(first_sum, second_sum, alpha=-1 / rows)
