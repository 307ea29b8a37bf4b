"""Routers in closed form from saved statistics (DUME Eqs. 6 and 7): no forward pass.

Shapes: H hidden size, D domains.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from upcycle_core.checkpoints.tensor_file import save_atomically
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.cross_validation import Candidate, best, cross_validate
from upcycle_core.dume.ridge import NormalEquations, normal_equations, ridge
from upcycle_core.dume.router_reader import KIND, LambdaChoice, RouterSolution
from upcycle_core.dume.statistics import Statistics
from upcycle_core.errors import Fault, raise_faults


def solve(
    statistics: Mapping[str, Statistics],
    layer: int,
    *,
    ridge_lambda: float,
    config: RouterConfig | None = None,
    window: int | None = None,
) -> Tensor:
    """W = (A + lambda I)^-1 b, columns divided by their norm (Eqs. 6 and 7).

    Args:
        statistics: By domain, in the order of the columns.
        layer: Which router.
        ridge_lambda: Added raw to A's diagonal.
        config: The domains' weights, and what the solution is divided by and multiplied with; the
            paper's way by default.
        window: Only the first positions of each paragraph; one of the position buckets.

    Returns:
        [H, D] fp64.

    Raises:
        InputError: a domain without tokens, or A + lambda I not positive definite.
    """
    config = config or RouterConfig()
    equations = normal_equations(
        statistics, layer, domain_weights=config.domain_weights, window=window
    )
    _require_tokens(equations, list(statistics))
    if config.rows == "means":
        weights_HD = equations.sums_HD / equations.counts_D
    else:
        weights_HD = ridge(equations, ridge_lambda, layer=layer)
    if config.normalise == "columns":
        weights_HD = weights_HD / weights_HD.norm(dim=0)
    return weights_HD * config.scale


def solve_with_bias(
    statistics: Mapping[str, Statistics], layer: int, *, ridge_lambda: float
) -> tuple[Tensor, Tensor]:
    """The published code's router: a ones feature, which the paper and stock routers do not have.

    Returns:
        W [H, D] and bias [D], fp64, both divided by the norms of W's columns.
    """
    equations = normal_equations(statistics, layer).with_ones_feature()
    _require_tokens(equations, list(statistics))
    solution = ridge(equations, ridge_lambda, layer=layer)
    weights_HD, bias_D = solution[:-1], solution[-1]
    norms_D = weights_HD.norm(dim=0)
    return weights_HD / norms_D, bias_D / norms_D


def _require_tokens(equations: NormalEquations, domains: Sequence[str]) -> None:
    empty = [d for d, n in zip(domains, equations.counts_D, strict=True) if n == 0]
    remedy = "its statistics hold no tokens: give calibration text"
    raise_faults(Fault("statistics", domain, remedy) for domain in empty)


def choose_lambda(
    statistics: Mapping[str, Statistics], *, config: RouterConfig, window: int | None = None
) -> LambdaChoice:
    """The recipe's lambda, or the best of its grid on held-back folds, one for all layers."""
    if config.ridge_lambda != "cross-validate":
        return LambdaChoice(config.ridge_lambda)
    table = cross_validate(
        statistics, grid=config.lambda_grid, domain_weights=config.domain_weights, window=window
    )
    return LambdaChoice(best(table).ridge_lambda, "cross-validation", tuple(table))


def solve_routers(
    statistics: Mapping[str, Statistics],
    *,
    config: RouterConfig,
    window: int | None = None,
) -> RouterSolution:
    """All routers from one pass (the paper's ``joint`` way).

    Args:
        config: lambda or how to choose it, the domains' weights, the solution's norm.
        statistics, window: As for ``solve``.

    Raises:
        InputError: see ``solve`` and ``cross_validation.best``.
    """
    choice = choose_lambda(statistics, config=config, window=window)
    layers = next(iter(statistics.values())).layout.layers
    weights = {
        layer: solve(
            statistics, layer, ridge_lambda=choice.ridge_lambda, config=config, window=window
        )
        for layer in layers
    }
    return RouterSolution(weights, tuple(statistics), choice)


def solve_sequentially(
    layers: Sequence[int],
    gather: Callable[[int, Mapping[int, Tensor]], Mapping[str, Statistics]],
    *,
    choice: LambdaChoice,
    config: RouterConfig | None = None,
) -> RouterSolution:
    """Router by router: each from inputs that the routers before it have shaped (the ablation).

    Args:
        layers: All layers, ascending.
        gather: Called with a layer and the routers before it; returns that layer's statistics by
            domain (``sequential_statistics``). Where pieces are kept, a rerun finds them here.
        choice: lambda; choose it on statistics of the joint pass, if at all.
        config: As for ``solve``.
    """
    weights: dict[int, Tensor] = {}
    domains: tuple[str, ...] = ()
    for layer in layers:
        statistics = gather(layer, dict(weights))
        domains = tuple(statistics)
        weights[layer] = solve(statistics, layer, ridge_lambda=choice.ridge_lambda, config=config)
    return RouterSolution(weights, domains, choice)


def save_routers(solution: RouterSolution, path: Path) -> None:
    """Write the routers and how their lambda was chosen; equal content gives equal bytes."""
    tensors = {str(layer): w.contiguous() for layer, w in solution.weights.items()}
    choice = solution.choice
    header = {
        "layers": sorted(solution.weights),
        "domains": solution.domains,
        "ridge_lambda": choice.ridge_lambda,
        "chosen_by": choice.chosen_by,
        "table": [_row(candidate) for candidate in choice.table],
    }
    save_atomically(path, tensors, kind=KIND, header=header)


def _row(candidate: Candidate) -> dict:
    # JSON has no infinity
    losses = {str(k): v if math.isfinite(v) else None for k, v in candidate.losses.items()}
    return {"ridge_lambda": candidate.ridge_lambda, "losses": losses}
