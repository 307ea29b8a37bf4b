"""Ridge regression from sums."""

import pytest
import torch

from upcycle_core.activations.moments import BLOCK
from upcycle_core.activations.regression import LAMBDAS, DriftSums, _held_out, _ridge, solve_drift


def sums(features, drift):
    found = DriftSums.zeros(features.shape[1], drift.shape[1], "cpu")
    found.add(features, drift)
    return found


def test_a_solution_is_that_of_the_normal_equations():
    torch.manual_seed(0)
    a_TI, r_TH = torch.randn(80, 30).double(), torch.randn(80, 5).double()
    of = sums(a_TI, r_TH)
    mean = a_TI.square().sum() / 30
    for factor in (1.0, 1e-3):
        ridge = a_TI.T @ a_TI + factor * mean * torch.eye(30).double()
        expected = torch.linalg.solve(ridge, a_TI.T @ r_TH)
        found = _ridge(of, factor, of.cross_IH)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_what_is_not_positive_definite_is_not_solved():
    of = sums(torch.ones(4, 3).double(), torch.ones(4, 2).double())
    of.gram_II[2, 2] = -20.0
    with pytest.raises(torch.linalg.LinAlgError):
        _ridge(of, 1e-4, of.cross_IH)


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


@pytest.mark.parametrize("seed", range(3))
def test_the_share_that_is_left_of_a_drift_of_few_directions(seed):
    """It is judged on random directions, which may have much more or less of such a drift."""
    draw = torch.Generator().manual_seed(seed)
    a_TI = torch.randn(400, 6, generator=draw).double()
    way_H, noise_TH = torch.randn(200, generator=draw), torch.randn(400, 200, generator=draw)
    r_TH = torch.outer(a_TI[:, 0], way_H.double()) + 0.1 * noise_TH
    halves = [(a_TI[:200], r_TH[:200]), (a_TI[200:], r_TH[200:])]
    factor, left, _ = solve_drift([sums(a, r) for a, r in halves], 0, "field")
    missed = 0.0
    for seen, (a, r) in zip(halves[::-1], halves, strict=True):
        gram = seen[0].T @ seen[0]
        ridge = gram + factor * gram.trace() / 6 * torch.eye(6).double()
        missed += float((r - a @ torch.linalg.solve(ridge, seen[0].T @ seen[1])).square().sum())
    assert left == pytest.approx(missed / float(r_TH.square().sum()), abs=0.01)


def test_a_smaller_lambda_may_win_where_the_largest_does_harm():
    """A feature that is large, and whose drift differs between halves, is what lambda = 1 fits."""
    draw = torch.Generator().manual_seed(0)
    true_IH, halves = torch.randn(20, 50, generator=draw).double(), []
    for sign in (1, -1):
        a_TI = torch.randn(400, 20, generator=draw).double()
        a_TI[:, 0] *= 20
        r_TH = a_TI[:, 1:] @ true_IH[1:]
        r_TH += sign * 0.05 * torch.outer(a_TI[:, 0], true_IH[0])
        halves.append(sums(a_TI, r_TH))
    factor, left, _ = solve_drift(halves, 0, "field")
    assert _held_out(halves, 1.0)[0] > 0 > _held_out(halves, 1e-2)[0]
    assert factor in LAMBDAS[1:]
    assert left < 0.5


def test_sums_of_many_features_are_solved_whole():
    """They are added up in blocks of rows, of which only those below the diagonal are computed."""
    draw = torch.Generator().manual_seed(0)
    size = 2 * BLOCK + 30
    true_IH = torch.randn(size, 3, generator=draw).double()
    texts = [torch.randn(3 * size, size, generator=draw).double() for _ in range(2)]
    factor, left, found = solve_drift([sums(a, a @ true_IH) for a in texts], 0, "field")
    a_TI = torch.cat(texts)
    ridge = a_TI.T @ a_TI
    ridge += factor * ridge.diagonal().mean() * torch.eye(size).double()
    expected = torch.linalg.solve(ridge, a_TI.T @ (a_TI @ true_IH))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert 0 <= left < 0.01
