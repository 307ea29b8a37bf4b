"""Ridge regression from sums, wherever they lie."""

import pytest
import torch
from scipy import linalg

from upcycle_core.activations.regression import DriftSums, _ridge, _solved_there, solve_drift


def sums(features, drift):
    found = DriftSums.zeros(features.shape[1], drift.shape[1], "cpu")
    found.add(features, drift)
    return found


def test_a_gpu_solves_what_lapack_does():
    torch.manual_seed(0)
    a_TI, r_TH = torch.randn(80, 30).double(), torch.randn(80, 5).double()
    of = sums(a_TI, r_TH)
    mean = a_TI.square().sum() / 30
    for factor in (1.0, 1e-3):
        ridge = a_TI.T @ a_TI + factor * mean * torch.eye(30).double()
        expected = torch.linalg.solve(ridge, a_TI.T @ r_TH)
        for found in (
            _ridge(of, factor, of.cross_IH),
            _solved_there(of.gram_II, factor, of.cross_IH),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_neither_solves_what_is_not_positive_definite():
    of = sums(torch.ones(4, 3).double(), torch.ones(4, 2).double())
    of.gram_II[2, 2] = -20.0
    with pytest.raises(linalg.LinAlgError):
        _ridge(of, 1e-4, of.cross_IH)
    with pytest.raises(linalg.LinAlgError):
        _solved_there(of.gram_II, 1e-4, of.cross_IH)


@pytest.mark.parametrize("firsts", [0, 1, 40])
def test_the_share_that_is_left_is_of_tokens_that_are_not_first(firsts):
    """First tokens have most of the drift; where there are no others, they are what is told of."""
    torch.manual_seed(1)
    a_TI, true_IH = torch.randn(80, 6).double(), torch.randn(6, 3).double()
    r_TH = a_TI @ true_IH + 0.5 * torch.randn(80, 3)
    is_first = torch.arange(80) % 40 < firsts
    r_TH[is_first] *= 20
    halves = [a_TI[:40], r_TH[:40]], [a_TI[40:], r_TH[40:]]
    with_firsts = []
    for (a, r), first in zip(halves, is_first.split(40), strict=True):
        with_firsts.append(sums(a, r))
        with_firsts[-1].begun.append((a[first], r[first]))
    plain = solve_drift([sums(a, r) for a, r in halves], 0, "field")
    factor, left, solution = solve_drift(with_firsts, 0, "field")
    assert factor == plain[0]
    assert torch.equal(solution, plain[2])
    after = torch.empty_like(r_TH)
    for place, (a, r) in enumerate(halves[::-1]):
        of = slice(40 * place, 40 * place + 40)
        ridge = a.T @ a + factor * a.square().sum() / 6 * torch.eye(6).double()
        after[of] = r_TH[of] - a_TI[of] @ torch.linalg.solve(ridge, a.T @ r)
    told = torch.ones(80, dtype=torch.bool) if firsts == 40 else ~is_first
    expected = float(after[told].square().sum() / r_TH[told].square().sum())
    assert left == pytest.approx(expected, rel=1e-9)
    assert (left == plain[1]) == (firsts != 1)


def test_drift_of_first_tokens_alone_has_a_share_as_well():
    draw = torch.Generator().manual_seed(0)
    weight, sums = torch.randn(3, 4, generator=draw), []
    for _ in range(2):
        a = torch.randn(50, 4, generator=draw)
        first = torch.arange(50) < 25
        a[~first] = 0
        sums.append(DriftSums.zeros(4, 3, "cpu"))
        sums[-1].add(a, a @ weight.T, first)
    _, left, _ = solve_drift(sums, 0, "field")
    assert 0 <= left < 0.5
