"""Streaming cross-moments and similarities against columns compared one by one in fp64."""

import pytest
import torch

from upcycle_core.activations.cross import CrossMoments, batch_products, power_sums, similarity

SIZE = 6


def streams(rows: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_TI = torch.randn(rows, SIZE, generator=generator, dtype=torch.float64) + 0.5
    noise = torch.randn(rows, SIZE, generator=generator, dtype=torch.float64)
    return x_TI, 2 * x_TI.flip(1) + noise - 1


def counted(x_TI: torch.Tensor, y_TI: torch.Tensor) -> CrossMoments:
    moments = CrossMoments(SIZE)
    for batch in zip(x_TI.split(7), y_TI.split(7), strict=True):
        moments.update(*batch)
    return moments


def plain_similarity(x: torch.Tensor, y: torch.Tensor, kind: str) -> float:
    """Two columns [T]."""
    if kind == "l2":
        return -float(((x - y) ** 2).mean())
    if kind == "correlation":
        x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x.norm() * y.norm()))


def test_moments_of_batches_are_sums_over_all_rows():
    x_TI, y_TI = streams()
    moments = counted(x_TI, y_TI)
    expected = sum(torch.outer(x, y) for x, y in zip(x_TI, y_TI, strict=True))
    torch.testing.assert_close(moments.products, expected, rtol=1e-13, atol=1e-13)
    for index, stream in enumerate((x_TI, y_TI)):
        torch.testing.assert_close(moments.sums[index], stream.sum(0), rtol=1e-13, atol=1e-13)
        squares = (stream**2).sum(0)
        torch.testing.assert_close(moments.squares[index], squares, rtol=1e-13, atol=1e-13)
    assert moments.count == 40


@pytest.mark.parametrize("kind", ["cosine", "correlation", "l2"])
def test_similarities_are_those_of_the_columns(kind):
    x_TI, y_TI = streams()
    found = similarity(counted(x_TI, y_TI), kind)
    for i in range(SIZE):
        for j in range(SIZE):
            expected = plain_similarity(x_TI[:, i], y_TI[:, j], kind)
            assert float(found.matrix[i, j]) == pytest.approx(expected, abs=1e-12)


def test_padding_is_never_read_and_rows_may_stand_opposite_others():
    x_TI, y_TI = streams(8)
    rows, others = torch.tensor([0, 2, 5]), torch.tensor([1, 2, 7])
    expected = x_TI[rows].T @ y_TI[others]
    same = x_TI[rows].T @ y_TI[rows]
    for second, result in ((others, expected), (None, same)):
        x, y = x_TI.clone(), y_TI.clone()
        x[[1, 3, 4, 6, 7]] = torch.nan
        y[[i for i in range(8) if i not in (rows if second is None else second)]] = torch.nan
        moments = CrossMoments(SIZE)
        moments.update(x.view(2, 4, SIZE), y.view(2, 4, SIZE), rows=rows, second_rows=second)
        torch.testing.assert_close(moments.products, result, rtol=1e-13, atol=1e-13)
        assert moments.count == 3
        moments.checked_rows()


def test_streams_of_other_lengths_are_refused():
    x_TI, y_TI = streams(8)
    with pytest.raises(ValueError, match="8 rows of the first stream, 7 of the second"):
        CrossMoments(SIZE).update(x_TI, y_TI[:7])


def test_merged_moments_are_the_moments_of_both():
    x_TI, y_TI = streams(20)
    one, two = counted(x_TI[:8], y_TI[:8]), counted(x_TI[8:], y_TI[8:])
    one.merge(two)
    for name, tensor in counted(x_TI, y_TI).tensors().items():
        torch.testing.assert_close(one.tensors()[name], tensor, rtol=1e-13, atol=1e-13)


def test_moments_come_back_from_their_tensors_and_go_on_counting():
    x_TI, y_TI = streams()
    again = CrossMoments.from_tensors(counted(x_TI, y_TI).tensors("3."), "3.")
    again.update(x_TI, y_TI)
    assert again.size == SIZE
    assert again.count == 80
    torch.testing.assert_close(again.products, 2 * x_TI.T @ y_TI, rtol=1e-13, atol=1e-13)


def test_batches_are_added_up_in_fp64():
    # 4096 * 4096 + 1 is no fp32 number: the ones would be lost
    moments = CrossMoments(1)
    moments.update(torch.full((1, 1), 4096.0), torch.full((1, 1), 4096.0))
    for _ in range(100):
        moments.update(torch.ones(1, 1), torch.ones(1, 1))
    assert moments.products.item() == moments.squares[0].item() == 4096.0**2 + 100


@pytest.mark.parametrize(
    ("dtype", "result", "tolerance"),
    # Products of bf16 numbers are exact in fp32: only their sum rounds, as for fp32.
    [(torch.float64, torch.float64, 1e-14), (torch.bfloat16, torch.float32, 1e-6)],
)
def test_products_keep_the_features_precision(dtype, result, tolerance):
    x_TI, y_TI = (stream.to(dtype) for stream in streams(2000))
    found, expected = batch_products(x_TI, y_TI), x_TI.double().T @ y_TI.double()
    assert found.dtype == result
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", ["cosine", "correlation"])
def test_constant_features_are_dead_and_like_nothing(kind):
    x_TI, y_TI = (stream.float() for stream in streams(5000))
    x_TI[:, 1], y_TI[:, 2], y_TI[:, 4] = 0.0, 0.1, -7.3
    found = similarity(counted(x_TI, y_TI), kind)
    assert found.dead_first.nonzero()[:, 0].tolist() == [1]
    assert found.dead_second.nonzero()[:, 0].tolist() == [2, 4]
    assert not found.matrix[1].any()
    assert not found.matrix[:, [2, 4]].any()
    assert found.matrix.isfinite().all()


def test_a_feature_that_hardly_varies_is_not_dead():
    x_TI, y_TI = streams()
    x_TI[:, 0] = 1 + 1e-3 * x_TI[:, 0]
    found = similarity(counted(x_TI, y_TI), "correlation")
    assert not found.dead_first.any()
    expected = plain_similarity(x_TI[:, 0], y_TI[:, 5], "correlation")
    assert float(found.matrix[0, 5]) == pytest.approx(expected, abs=1e-8)


def test_what_is_not_finite_is_named_and_never_compared():
    x_TI, y_TI = streams()
    y_TI[3, 3] = torch.inf
    moments = counted(x_TI, y_TI)
    with pytest.raises(ValueError, match=r"finite: \[True, False\]"):
        similarity(moments, "cosine")
    with pytest.raises(ValueError, match="0 rows"):
        similarity(CrossMoments(SIZE), "cosine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_sums_tell_the_variance_of_features_that_hardly_vary(dtype):
    """Plain fp32 sums give noise for the first; the first row is no shift for the second."""
    x_TI = streams(5000)[0].float()
    x_TI[:, 0] = 1 + 1e-3 * x_TI[:, 0]
    x_TI[0, 1], x_TI[:, 2] = 3e4, 0.1
    x_TI = x_TI.to(dtype)
    sums, squares = power_sums(x_TI)
    exact = x_TI.double()
    torch.testing.assert_close(sums, exact.sum(0), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(squares, exact.square().sum(0), rtol=1e-6, atol=0)
    variance = squares / 5000 - (sums / 5000).square()
    torch.testing.assert_close(variance, exact.var(0, correction=0), rtol=1e-5, atol=1e-12)


def test_a_batch_without_rows_counts_nothing():
    moments = counted(*streams(8))
    before = {name: part.clone() for name, part in moments.tensors().items()}
    moments.update(torch.full((1, 3, SIZE), torch.nan), torch.zeros(3, SIZE), rows=torch.arange(0))
    assert all(torch.equal(part, before[name]) for name, part in moments.tensors().items())
