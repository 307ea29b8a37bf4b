"""Streaming moments against sums written out in fp64."""

import pytest
import torch

import upcycle_core.activations.moments as module
from upcycle_core.activations.moments import Moments, add_gram, mirror, unpack_triangle

SIZE = 12


def features(rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, SIZE, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def test_triangle_is_packed_and_unpacked_without_loss():
    x_TH = features(5)
    matrix = x_TH.T @ x_TH
    moments = Moments(SIZE)
    moments.update(x_TH)
    (packed,) = moments.products
    assert packed.shape == (SIZE * (SIZE + 1) // 2,)
    assert packed[:3].tolist() == [matrix[0, 0], matrix[1, 0], matrix[1, 1]]
    assert torch.equal(unpack_triangle(packed, SIZE), matrix)


def test_moments_of_batches_equal_moments_of_everything():
    x_TH = features(50)
    moments = Moments(SIZE)
    for batch in x_TH.split(7):
        moments.update(batch)
    expected = sum(torch.outer(row, row) for row in x_TH)
    torch.testing.assert_close(moments.gram(), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(moments.sum(), x_TH.sum(0), rtol=1e-13, atol=1e-13)
    assert moments.count() == 50


def test_rows_left_out_are_never_read():
    x_BSH = features(12).view(3, 4, SIZE)
    mask_BS = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    kept = x_BSH[mask_BS.bool()]
    x_BSH[~mask_BS.bool()] = torch.nan
    moments = Moments(SIZE)
    moments.update(x_BSH, rows=mask_BS.flatten().nonzero().flatten())
    torch.testing.assert_close(moments.gram(), kept.T @ kept, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(moments.sum(), kept.sum(0), rtol=1e-13, atol=1e-13)
    assert moments.count() == 8


def test_cells_are_kept_apart_and_added_up():
    one, two = features(5, seed=1), features(6, seed=2)
    moments = Moments(SIZE, cells=3)
    moments.update(one, cell=0)
    moments.update(two, cell=2)
    for cell, x_TH in ((0, one), (2, two)):
        torch.testing.assert_close(unpack_triangle(moments.products[cell], SIZE), x_TH.T @ x_TH)
    torch.testing.assert_close(moments.gram(), one.T @ one + two.T @ two)
    assert moments.counts.tolist() == [5, 0, 6]
    torch.testing.assert_close(moments.sum(), one.sum(0) + two.sum(0))


def test_merged_moments_are_the_moments_of_both():
    one, two, both = Moments(SIZE), Moments(SIZE), Moments(SIZE)
    for moments, batch in ((one, features(5, seed=1)), (two, features(6, seed=2))):
        moments.update(batch)
        both.update(batch)
    one.merge(two)
    for name, tensor in both.tensors().items():
        assert torch.equal(one.tensors()[name], tensor), name


def test_moments_come_back_from_their_tensors():
    moments = Moments(SIZE, cells=2)
    moments.update(features(5), cell=1)
    once = moments.gram()
    again = Moments.from_tensors(moments.tensors("3."), "3.")
    again.update(features(5), cell=1)
    assert torch.equal(again.gram(), 2 * once)
    assert again.count() == 10


def test_batches_are_added_up_in_fp64():
    # 4096 * 4096 + 1 is no fp32 number: the ones would be lost
    moments = Moments(1)
    moments.update(torch.full((1, 1), 4096.0))
    for _ in range(100):
        moments.update(torch.ones(1, 1))
    assert moments.gram().item() == 4096.0**2 + 100


@pytest.mark.parametrize("size", [5, 300, 1100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # products of bf16 numbers are exact in fp32: only their sum rounds, as for fp32
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 3e-6)],
)
@pytest.mark.parametrize("units", [False, True])
def test_a_gram_keeps_the_features_precision(size, dtype, tolerance, units, monkeypatch):
    monkeypatch.setattr(module, "matrix_units", lambda: units)
    x_TH = torch.randn(2000, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    gram_HH = torch.eye(size, dtype=torch.float64)
    for half_TH in x_TH.chunk(2):
        add_gram(gram_HH, half_TH)
        mirror(gram_HH)
    expected = torch.eye(size) + x_TH.double().T @ x_TH.double()
    assert (gram_HH - expected).abs().max() <= tolerance * expected.abs().max()


def test_sums_leave_torch_settings_as_they_were():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        add_gram(torch.zeros(4, 4).double(), torch.ones(4, 4, dtype=torch.bfloat16))
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [90, 128, 300, 1100])
def test_a_triangle_of_several_blocks_of_rows_is_whole(size, dtype, units, monkeypatch):
    monkeypatch.setattr(module, "matrix_units", lambda: units)
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(20, size, generator=generator).to(dtype)
    counted = Moments(size)
    counted.update(x_TH)
    wide_TH = x_TH.double()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    expected = wide_TH.T @ wide_TH
    torch.testing.assert_close(counted.gram(), expected, rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(counted.sum(), wide_TH.sum(0), rtol=tolerance, atol=10 * tolerance)
