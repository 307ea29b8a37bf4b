"""Ridge regression from sums alone (DUME Eqs. 2 and 6).

Shapes: H hidden size, D domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import linalg
from torch import Tensor

from upcycle_core.dume.statistics import Statistics
from upcycle_core.errors import Fault, InputError, raise_faults


class NotPositiveDefinite(InputError):
    """A + lambda I cannot be factorised."""


@dataclass(frozen=True)
class NormalEquations:
    """What the regression of domain labels on router inputs needs; targets are one-hot."""

    gram_HH: Tensor
    """X^T X over all domains, [H, H] fp64."""
    sums_HD: Tensor
    """X^T Y: column d is the sum of domain d's features, [H, D] fp64."""
    counts_D: Tensor
    """diag(Y^T Y): tokens a domain, [D] fp64."""

    def with_ones_feature(self) -> "NormalEquations":
        """The same with a constant feature behind the others: H + 1 rows, the last a bias."""
        sum_H1, count = self.sums_HD.sum(1, keepdim=True), self.counts_D.sum().view(1, 1)
        top = torch.cat([self.gram_HH, sum_H1], dim=1)
        bottom = torch.cat([sum_H1.T, count], dim=1)
        sums = torch.cat([self.sums_HD, self.counts_D[None, :]])
        return NormalEquations(torch.cat([top, bottom]), sums, self.counts_D)


def normal_equations(
    statistics: Mapping[str, Statistics],
    layer: int,
    *,
    domain_weights: Mapping[str, float] | None = None,
    window: int | None = None,
    folds: Sequence[int] | None = None,
) -> NormalEquations:
    """Add up domains; what is left out is never added, so nothing has to be subtracted.

    Args:
        statistics: By domain; their order is the order of the router's columns.
        layer: Which layer's router.
        domain_weights: Factors on a domain's sums; 1 where none is given.
        window: Only positions below it (one of the position buckets); all by default.
        folds: Only these folds; all by default.

    Raises:
        InputError: statistics of different models, or a weight for a domain that is not there.
    """
    weights = dict(domain_weights or {})
    raise_faults(faults(statistics, layer, weights))
    size = next(iter(statistics.values())).layout.hidden_size
    gram_HH = torch.zeros(size, size, dtype=torch.float64)
    sums, counts = [], []
    for domain, of_domain in statistics.items():
        weight = weights.get(domain, 1.0)
        moments = of_domain.moments(layer, folds=folds, window=window)
        gram_HH += weight * moments.gram()
        sums.append(weight * moments.sum())
        counts.append(weight * moments.count())
    return NormalEquations(gram_HH, torch.stack(sums, 1), torch.tensor(counts, dtype=torch.float64))


def faults(
    statistics: Mapping[str, Statistics], layer: int, weights: Mapping[str, float]
) -> list[Fault]:
    """Everything that keeps ``statistics`` from being added up."""
    found = []
    sizes = {domain: s.layout.hidden_size for domain, s in statistics.items()}
    if len(set(sizes.values())) != 1:
        found.append(Fault("statistics", sizes, "need one hidden size: statistics of one model"))
    for domain, of_domain in statistics.items():
        if layer not in of_domain.layout.layers:
            have = f"statistics hold layers {list(of_domain.layout.layers)}"
            found.append(Fault(f"statistics.{domain}", layer, f"{have}: compute this layer's"))
    for domain, weight in weights.items():
        field = f"router.domain_weights.{domain}"
        if domain not in statistics:
            found.append(Fault(field, weight, f"no such domain; there are {list(statistics)}"))
        elif not weight > 0:
            found.append(Fault(field, weight, "must be above 0; leave the domain out instead"))
    return found


def ridge(equations: NormalEquations, ridge_lambda: float, *, layer: int) -> Tensor:
    """(A + lambda I)^-1 b by Cholesky in fp64, columns as they come (Eq. 6).

    Returns:
        [H, D] fp64.

    Raises:
        NotPositiveDefinite: names layer, lambda and condition number.
        InputError: lambda below 0, or statistics that are not finite.
    """
    if not ridge_lambda >= 0:
        raise InputError(Fault("router.ridge_lambda", ridge_lambda, "must be 0 or more"))
    matrix = equations.gram_HH.numpy() + ridge_lambda * np.eye(len(equations.gram_HH))
    if not np.isfinite(matrix).all():
        remedy = f"layer {layer}'s statistics hold NaN or inf: check the experts' weights"
        raise InputError(Fault("statistics", float("nan"), remedy))
    try:
        factor = linalg.cholesky(matrix, lower=True)
    except linalg.LinAlgError:
        raise _not_positive_definite(matrix, ridge_lambda, layer) from None
    # rounding can let a singular matrix through: its solution has not one correct digit
    reciprocal_condition, _ = linalg.lapack.dpocon(factor, linalg.norm(matrix, 1), uplo="L")
    if reciprocal_condition < 10 * np.finfo(np.float64).eps:
        raise _not_positive_definite(matrix, ridge_lambda, layer)
    return torch.from_numpy(linalg.cho_solve((factor, True), equations.sums_HD.numpy()))


def _not_positive_definite(
    matrix: np.ndarray, ridge_lambda: float, layer: int
) -> NotPositiveDefinite:
    smallest, largest = linalg.eigvalsh(matrix)[[0, -1]]
    condition = largest / smallest if smallest > 0 else np.inf
    enough = ridge_lambda - min(smallest, 0) + 1e-12 * abs(largest)
    remedy = (
        f"layer {layer}: A + lambda I is not positive definite in fp64 (condition number "
        f"{condition:.1e}, smallest eigenvalue {smallest:.1e}); take ridge_lambda >= {enough:.0e} "
        "or more calibration text"
    )
    return NotPositiveDefinite(Fault("router.ridge_lambda", ridge_lambda, remedy))
