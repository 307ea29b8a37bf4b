"""Ridge regression from sums, wherever they lie."""

import pytest
import torch
from scipy import linalg

from upcycle_core.activations.regression import DriftSums, _ridge, _solved_there


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
