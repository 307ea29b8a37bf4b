"""Ridge regression of a drift on features, from sums of two halves of a text.

The halves are different documents: lambda is chosen by what one's solution explains of the other.

Shapes: T tokens, F of them first in their paragraphs, I features, H width of the drift, K
directions of it, N targets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from upcycle_core.activations.cross import batch_products
from upcycle_core.activations.moments import add_gram, mirror
from upcycle_core.errors import Fault, InputError

HALVES = 2
LAMBDAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Candidates of lambda, in mean diagonals of sum a a^T; none of them may be chosen either."""
ROUNDED = 1e-5
"""A share of the drift that is nothing."""
SKETCH = 32
"""Most random directions of the drift that lambda and what is left are judged on: K."""


@dataclass
class DriftSums:
    """What the regression needs of one half of the text, of one target of the drift or of several.

    Targets stand side by side: H is all their columns.
    """

    gram_II: Tensor
    """sum a a^T, fp64; what lies above its diagonal is filled by ``solve_drift``."""
    cross_IH: Tensor
    """sum a r^T, fp64."""
    drift_NK: Tensor
    """sum r^2 of each target on K directions, fp64."""
    tokens: int = 0
    begun: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """a [F, I] and r [F, H] of first tokens of paragraphs; the sums hold them as well."""

    @classmethod
    def zeros(cls, inner: int, hidden: int, device: str, *, targets: int = 1) -> "DriftSums":
        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        drift_NK = empty(targets, min(SKETCH, hidden // targets))
        return cls(empty(inner, inner), empty(inner, hidden), drift_NK)

    def add(self, a_TI: Tensor, r_TH: Tensor, first_T: Tensor | None = None) -> None:
        """Count tokens; products in the features' own precision, as statistics are.

        Args:
            a_TI: Features.
            r_TH: The drift.
            first_T: Which tokens are the first of a paragraph, bool.
        """
        if first_T is not None:
            self.begun.append((a_TI[first_T], r_TH[first_T]))
        add_gram(self.gram_II, a_TI)
        rounded_TH = _multiplied(a_TI, r_TH)
        if rounded_TH.dtype == a_TI.dtype:
            self.cross_IH += batch_products(a_TI, rounded_TH)
        else:
            self.cross_IH += a_TI.T.to(r_TH.dtype) @ r_TH
        for drift_K, own_TH in zip(
            self.drift_NK, rounded_TH.to(r_TH.dtype).chunk(len(self.drift_NK), dim=1), strict=True
        ):
            on_TK = own_TH @ directions(own_TH.shape[1], r_TH.device).to(r_TH.dtype)
            drift_K += on_TK.square().sum(0, dtype=torch.float64)
        self.tokens += len(a_TI)

    def target(self, index: int) -> "DriftSums":
        """The sums of one target."""
        size = self.cross_IH.shape[1] // len(self.drift_NK)
        own = slice(index * size, (index + 1) * size)
        begun = [(a, r[:, own]) for a, r in self.begun]
        parts = (self.cross_IH[:, own], self.drift_NK[index : index + 1])
        return DriftSums(self.gram_II, *parts, self.tokens, begun)

    def __add__(self, other: "DriftSums") -> "DriftSums":
        gram, cross = self.gram_II + other.gram_II, self.cross_IH + other.cross_IH
        drift, tokens = self.drift_NK + other.drift_NK, self.tokens + other.tokens
        return DriftSums(gram, cross, drift, tokens, self.begun + other.begun)


@lru_cache(maxsize=4)
def directions(hidden: int, device: torch.device) -> Tensor:
    """K directions [H, K] fp64 on which a drift's square has its own as expectation.

    The unit vectors where there are no more than ``SKETCH``.
    """
    if hidden <= SKETCH:
        return torch.eye(hidden, dtype=torch.float64, device=device)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (hidden, SKETCH), generator=generator).double() * 2 - 1
    return (signs / math.sqrt(SKETCH)).to(device)


def solve_drift(
    sums: Sequence[DriftSums], layer: int, field: str
) -> tuple[float | None, float, Tensor]:
    """Solve for dW in r = dW a, with the lambda that serves the other half best.

    Args:
        sums: Of both halves, of one target.
        layer: How an error names it.
        field: Of the recipe, which the error names.

    Returns:
        lambda in mean diagonals, or None: nothing is to be won on unseen text; the share of the
        drift that is left on unseen text, first tokens of paragraphs apart; dW^T [I, H] fp64. All
        tokens decide lambda and the solution. A first token is an attention sink, whose drift may
        be nearly all there is.

    Raises:
        InputError: Activations are not finite.
    """
    for half in sums:
        mirror(half.gram_II)
    whole = sums[0] + sums[1]
    # A feature that is not finite shows in its own square.
    check_finite([whole.gram_II.diagonal(), whole.cross_IH], layer, field)
    changes: list[tuple[float, float]] = []
    for factor in LAMBDAS:  # where a smaller one is worse, those below it are worse still
        changes.append(_held_out(sums, factor))
        if changes[-1][0] > min(changes)[0]:
            break
    best = min(range(len(changes)), key=lambda index: changes[index][0])
    if not changes[best][0] < 0:
        return None, 1.0, torch.zeros_like(whole.cross_IH)
    solution = _ridge(whole, LAMBDAS[best], whole.cross_IH)
    return LAMBDAS[best], _left(whole, *changes[best]), solution


def check_finite(sums: Sequence[Tensor], layer: int, field: str) -> None:
    """Look at sums over a layer's activations before anything is solved with them.

    Args:
        sums: Any of them.
        layer: How an error names it.
        field: Of the recipe, which the error names.

    Raises:
        InputError: One holds NaN or infinity.
    """
    if not all(torch.isfinite(part).all() for part in sums):
        remedy = f"layer {layer}'s activations hold NaN or infinity: check the expert's weights"
        raise InputError(Fault(field, math.nan, remedy))


def _left(sums: DriftSums, change: float, of_begun: float) -> float:
    """The share of the drift that is left, of tokens that are not first; of all if all are."""
    drift, begun = float(sums.drift_NK.sum()), 0.0
    for a_FI, r_FH in sums.begun:
        begun += float(_sketched(a_FI, r_FH).square().sum())
    is_all_first = sum(len(r_FH) for _, r_FH in sums.begun) == sums.tokens
    if is_all_first or drift - begun <= ROUNDED * drift:  # nothing but first tokens has any
        of_begun = begun = 0.0
    return max(0.0, 1 + (change - of_begun) / (drift - begun))


def unseen_solutions(sums: Sequence[DriftSums], factor: float | None) -> list[Tensor]:
    """For each half dW^T [I, H] as the other half alone solves for it; zero without a lambda.

    Of sums that ``solve_drift`` has been given.
    """
    if factor is None:
        return [torch.zeros_like(half.cross_IH) for half in sums]
    return [_ridge(other, factor, other.cross_IH) for other in sums[::-1]]


def _held_out(sums: Sequence[DriftSums], factor: float) -> tuple[float, float]:
    """Change of the squared drift on each half by the other's solution; infinite if it has none.

    Of all tokens, and of first ones alone.

    ||r - dW a||^2 - ||r||^2 = tr(dW A dW^T) - 2 tr(dW B), on the drift's ``directions``.
    """
    signs = directions(sums[0].cross_IH.shape[1], sums[0].cross_IH.device)
    change, of_begun = 0.0, 0.0
    for seen, unseen in (sums, sums[::-1]):
        try:
            solution = _ridge(seen, factor, seen.cross_IH @ signs)
        except torch.linalg.LinAlgError:
            return math.inf, math.inf
        quadratic = ((unseen.gram_II @ solution) * solution).sum()
        change += float(quadratic - 2 * ((unseen.cross_IH @ signs) * solution).sum())
        for a_FI, r_FH in unseen.begun:
            added = a_FI.double() @ solution
            of_begun += float((added * (added - 2 * _sketched(a_FI, r_FH))).sum())
    return change, of_begun


def _sketched(a_TI: Tensor, r_TH: Tensor) -> Tensor:
    """The drift on its ``directions``, [T, K] fp64."""
    return _multiplied(a_TI, r_TH).double() @ directions(r_TH.shape[1], r_TH.device)


def _multiplied(a_TI: Tensor, r_TH: Tensor) -> Tensor:
    """The drift as it is rounded before products with the features."""
    return r_TH.to(a_TI.dtype) if a_TI.dtype == torch.bfloat16 and not a_TI.is_cuda else r_TH


def _ridge(sums: DriftSums, factor: float, right: Tensor) -> Tensor:
    """(A + lambda I)^-1 ``right`` by Cholesky in fp64, lambda in mean diagonals of A.

    Where the sums lie: a GPU takes seconds that one thread would take minutes for.

    Raises:
        LinAlgError: A + lambda I is not positive definite.
    """
    matrix = sums.gram_II.clone().mT  # symmetric, and as LAPACK lays matrices out
    matrix.diagonal().add_(factor * matrix.diagonal().mean())
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    # On a CPU in the place of the matrix: another square of I = 14,336 is 1.6 GB.
    lower = torch.empty_like(matrix) if matrix.is_cuda else matrix
    torch.linalg.cholesky_ex(matrix, out=(lower, info))
    if int(info):
        raise torch.linalg.LinAlgError("not positive definite")
    half = torch.linalg.solve_triangular(lower, right, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)
