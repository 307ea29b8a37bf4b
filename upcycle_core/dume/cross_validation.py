"""Lambda by cross-validation over folds, in closed form: no features, only their sums.

Targets are one-hot, so Y^T Y = diag(n_d), and the squared error of W on fold v is
tr(W^T A_v W) - 2 sum_d w_d . s_{d,v} + sum_d n_{d,v}. It is squared error before the columns are
normalised, not routing accuracy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upcycle_core.dume.ridge import NormalEquations, NotPositiveDefinite, normal_equations, ridge
from upcycle_core.dume.statistics import Statistics
from upcycle_core.errors import Fault, InputError


@dataclass(frozen=True)
class Candidate:
    """How one lambda did on text that it had not seen."""

    ridge_lambda: float
    """lambda."""
    losses: Mapping[int, float]
    """Held-out squared error a token, by layer; inf where A + lambda I cannot be factorised."""

    @property
    def loss(self) -> float:
        """Mean over layers."""
        return sum(self.losses.values()) / len(self.losses)


def squared_error(weights_HD: Tensor, equations: NormalEquations) -> float:
    """Sum over tokens of ||W^T x - y||^2, from the sums in ``equations`` alone."""
    quadratic = ((equations.gram_HH @ weights_HD) * weights_HD).sum()
    linear = (equations.sums_HD * weights_HD).sum()
    return float(quadratic - 2 * linear + equations.counts_D.sum())


def held_out_losses(
    statistics: Mapping[str, Statistics],
    layer: int,
    *,
    grid: Sequence[float],
    domain_weights: Mapping[str, float] | None = None,
    window: int | None = None,
) -> list[float]:
    """Held-out squared error a token of each lambda in ``grid``, at one layer.

    The equations a fold is judged on and those it is solved from are added up apart, and one of
    them is held at a time.

    Raises:
        InputError: fewer than two folds hold tokens, of all domains or of one.
    """
    folds = range(next(iter(statistics.values())).layout.folds)

    def summed(chosen: Sequence[int]) -> NormalEquations:
        return normal_equations(
            statistics, layer, domain_weights=domain_weights, window=window, folds=chosen
        )

    weights = domain_weights or {}
    counts_FD = torch.tensor(
        [
            [
                weights.get(name, 1.0) * own.count(layer, folds=[fold], window=window)
                for name, own in statistics.items()
            ]
            for fold in folds
        ],
        dtype=torch.float64,
    )
    filled = [fold for fold in folds if counts_FD[fold].sum() > 0]
    if len(filled) < 2:
        remedy = f"{len(filled)} of {len(folds)} folds hold tokens: give more calibration documents"
        raise InputError(Fault("router.ridge_lambda", "cross-validate", remedy))
    shares = (counts_FD > 0).sum(0).tolist()
    if alone := [name for name, own in zip(statistics, shares, strict=True) if own == 1]:
        remedy = f"all tokens of {', '.join(alone)} lie in one fold, as those of one document do, "
        remedy += "and are judged by routers that have seen none of them: give it as several "
        remedy += "documents, or name a number"
        raise InputError(Fault("router.ridge_lambda", "cross-validate", remedy))
    tokens = sum(float(counts_FD[fold].sum()) for fold in filled)
    losses = [0.0] * len(grid)
    for fold in filled:
        rest = summed([other for other in filled if other != fold])
        solved = [_solved(rest, ridge_lambda, layer) for ridge_lambda in grid]
        del rest
        held_out = summed([fold])
        for index, weights_HD in enumerate(solved):
            error = math.inf if weights_HD is None else squared_error(weights_HD, held_out)
            losses[index] += error / tokens
    return losses


def _solved(equations: NormalEquations, ridge_lambda: float, layer: int) -> Tensor | None:
    try:
        return ridge(equations, ridge_lambda, layer=layer)
    except NotPositiveDefinite:
        return None


def cross_validate(
    statistics: Mapping[str, Statistics],
    *,
    grid: Sequence[float],
    domain_weights: Mapping[str, float] | None = None,
    window: int | None = None,
) -> list[Candidate]:
    """Judge every lambda in ``grid`` at every layer.

    Returns:
        One candidate for each lambda, in the grid's order.
    """
    layers = next(iter(statistics.values())).layout.layers
    table = {
        layer: held_out_losses(
            statistics, layer, grid=grid, domain_weights=domain_weights, window=window
        )
        for layer in layers
    }
    return [
        Candidate(ridge_lambda, {layer: table[layer][index] for layer in layers})
        for index, ridge_lambda in enumerate(grid)
    ]


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate of lowest mean loss; the smaller lambda where two are equal.

    Raises:
        InputError: no lambda could be factorised at every layer.
    """
    chosen = min(candidates, key=lambda candidate: (candidate.loss, candidate.ridge_lambda))
    if math.isinf(chosen.loss):
        grid = [candidate.ridge_lambda for candidate in candidates]
        remedy = "A + lambda I is not positive definite for any of them: add larger ones"
        raise InputError(Fault("router.lambda_grid", grid, remedy))
    return chosen
