"""Ridge regression of a drift on features, from sums of two halves of a text.

The halves are different documents: lambda is chosen by what one's solution explains of the other.

Shapes: T tokens, I features, H width of the drift.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import linalg
from torch import Tensor

from upcycle_core.activations.cross import batch_products
from upcycle_core.activations.moments import add_gram
from upcycle_core.errors import Fault, InputError

HALVES = 2
LAMBDAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Candidates of lambda, in mean diagonals of sum a a^T; none of them may be chosen either."""
ROUNDED = 1e-9
"""A share of the drift that is nothing."""
SKETCH = 32
"""Random directions of the drift that lambda is judged on."""


@dataclass
class DriftSums:
    """What the regression needs of one half of the text."""

    gram_II: Tensor
    """sum a a^T, fp64."""
    cross_IH: Tensor
    """sum a r^T, fp64."""
    drift_H: Tensor
    """sum r^2, fp64."""
    tokens: int = 0
    begun: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """a [N, I] and r [N, H] of first tokens of paragraphs; the sums hold them as well."""

    @classmethod
    def zeros(cls, inner: int, hidden: int, device: str) -> "DriftSums":
        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(empty(inner, inner), empty(inner, hidden), empty(hidden))

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
        if a_TI.dtype == torch.bfloat16 and not a_TI.is_cuda:
            self.cross_IH += batch_products(a_TI, _multiplied(a_TI, r_TH))
        else:
            self.cross_IH += a_TI.T.to(r_TH.dtype) @ r_TH
        self.drift_H += r_TH.double().square().sum(0)
        self.tokens += len(a_TI)

    def columns(self, chosen: slice) -> "DriftSums":
        """The sums of some of the drift's columns."""
        parts = (self.cross_IH[:, chosen], self.drift_H[chosen])
        begun = [(a, r[:, chosen]) for a, r in self.begun]
        return DriftSums(self.gram_II, *parts, self.tokens, begun)

    def __add__(self, other: "DriftSums") -> "DriftSums":
        gram, cross = self.gram_II + other.gram_II, self.cross_IH + other.cross_IH
        drift, tokens = self.drift_H + other.drift_H, self.tokens + other.tokens
        return DriftSums(gram, cross, drift, tokens, self.begun + other.begun)


def solve_drift(
    sums: Sequence[DriftSums], layer: int, field: str
) -> tuple[float | None, float, Tensor]:
    """Solve for dW in r = dW a, with the lambda that serves the other half best.

    Args:
        sums: Of both halves.
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
    whole = sums[0] + sums[1]
    if not (torch.isfinite(whole.gram_II).all() and torch.isfinite(whole.cross_IH).all()):
        remedy = f"layer {layer}'s activations hold NaN or infinity: check the expert's weights"
        raise InputError(Fault(field, math.nan, remedy))
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


def _left(sums: DriftSums, change: float, of_begun: float) -> float:
    """The share of the drift that is left, of tokens that are not first; of all if all are."""
    drift = float(sums.drift_H.sum())
    if sum(len(r_NH) for _, r_NH in sums.begun) == sums.tokens:
        return 1 + change / drift
    begun = sum(float(r_NH.double().square().sum()) for _, r_NH in sums.begun)
    if drift - begun <= ROUNDED * drift:  # nothing but first tokens has any
        return 1 + change / drift
    return 1 + (change - of_begun) / (drift - begun)


def unseen_solutions(sums: Sequence[DriftSums], factor: float | None) -> list[Tensor]:
    """For each half dW^T [I, H] as the other half alone solves for it; zero without a lambda."""
    if factor is None:
        return [torch.zeros_like(half.cross_IH) for half in sums]
    return [_ridge(other, factor, other.cross_IH) for other in sums[::-1]]


def _held_out(sums: Sequence[DriftSums], factor: float) -> tuple[float, float]:
    """Change of the squared drift on each half by the other's solution; infinite if it has none.

    Of all tokens, and of first ones alone.

    ||r - dW a||^2 - ||r||^2 = tr(dW A dW^T) - 2 tr(dW B), on random directions of the drift, which
    have its expectation.
    """
    hidden = sums[0].cross_IH.shape[1]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (hidden, SKETCH), generator=generator).double() * 2 - 1
    if hidden <= SKETCH:
        signs = torch.eye(hidden, dtype=torch.float64) * math.sqrt(SKETCH)
    signs = (signs / math.sqrt(SKETCH)).to(sums[0].cross_IH.device)
    change, of_begun = 0.0, 0.0
    for seen, unseen in (sums, sums[::-1]):
        try:
            solution = _ridge(seen, factor, seen.cross_IH @ signs)
        except linalg.LinAlgError:
            return math.inf, math.inf
        quadratic = ((unseen.gram_II @ solution) * solution).sum()
        change += float(quadratic - 2 * ((unseen.cross_IH @ signs) * solution).sum())
        for a_NI, r_NH in unseen.begun:
            added = a_NI.double() @ solution
            wanted = _multiplied(a_NI, r_NH).double() @ signs
            of_begun += float((added * (added - 2 * wanted)).sum())
    return change, of_begun


def _multiplied(a_TI: Tensor, r_TH: Tensor) -> Tensor:
    """The drift as it is rounded before products with the features."""
    return r_TH.to(a_TI.dtype) if a_TI.dtype == torch.bfloat16 and not a_TI.is_cuda else r_TH


def _ridge(sums: DriftSums, factor: float, right: Tensor) -> Tensor:
    """(A + lambda I)^-1 ``right`` by Cholesky in fp64, lambda in mean diagonals of A.

    On a GPU there, where it takes seconds that one thread would take minutes for.
    """
    if sums.gram_II.is_cuda:
        return _solved_there(sums.gram_II, factor, right)
    matrix = sums.gram_II.cpu().numpy().copy().T  # symmetric, and as LAPACK lays matrices out
    matrix[np.diag_indices(len(matrix))] += factor * matrix.trace() / len(matrix)
    lower = linalg.cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
    solution = linalg.cho_solve(lower, right.cpu().numpy(), check_finite=False)
    return torch.from_numpy(solution).to(right.device)


def _solved_there(gram_II: Tensor, factor: float, right: Tensor) -> Tensor:
    """The same where the sums lie.

    Raises:
        LinAlgError: A + lambda I is not positive definite.
    """
    matrix = gram_II.clone()
    matrix.diagonal().add_(factor * matrix.diagonal().mean())
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise linalg.LinAlgError("not positive definite")
    return torch.cholesky_solve(right, lower)
