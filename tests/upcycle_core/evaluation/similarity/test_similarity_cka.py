"""CKA and matched features from sums, against every row kept."""

from itertools import combinations, permutations

import pytest
import torch

from tests.upcycle_core.evaluation.similarity import naive_cka
from upcycle_core.evaluation.similarity.cka import Likeness, StreamMoments, compare

ROWS, SIZE = 61, 6
EXACT = 1e-10  # fp64 throughout: rounding alone


def streams(count: int = 3, *, rows: int = ROWS, size: int = SIZE) -> list[torch.Tensor]:
    """Features that have something in common, with means far from zero."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    own = torch.randn(count, rows, size, generator=generator, dtype=torch.float64)
    return [common @ torch.rand(size, size, generator=generator).double() + x + 3 for x in own]


def counted(features: list[torch.Tensor]) -> StreamMoments:
    moments = StreamMoments(len(features), features[0].shape[1])
    for part in zip(*(x.split(17) for x in features), strict=True):
        moments.update(part)
    return moments


def likeness(first: torch.Tensor, second: torch.Tensor) -> Likeness:
    return compare(counted([first, second]))[0, 1]


def test_sums_give_what_every_row_gives():
    features = streams()
    moments = counted(features)
    found = compare(moments)
    assert moments.rows == ROWS
    assert list(found) == [(0, 1), (0, 2), (1, 2)]
    for first, second in combinations(range(3), 2):
        x, y = features[first], features[second]
        assert found[first, second].cka == pytest.approx(naive_cka.cka(x, y), abs=EXACT)
        assert found[first, second].matched == pytest.approx(naive_cka.matched(x, y), abs=EXACT)
        every = [naive_cka.matched(x, y[:, list(order)]) for order in permutations(range(SIZE))]
        assert found[first, second].best == pytest.approx(max(every), abs=EXACT)


def test_a_permutation_of_neurons_changes_what_stands_opposite_but_not_cka():
    x, y = streams(2)
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    before, after = likeness(x, y), likeness(x, y[:, order])
    assert before.cka == pytest.approx(after.cka, abs=EXACT)
    assert before.best == pytest.approx(after.best, abs=EXACT)
    assert abs(before.matched - after.matched) > 0.02
    assert likeness(x, x[:, order]).cka == pytest.approx(1, abs=EXACT)


def test_a_rotation_does_not_change_cka():
    x, y = streams(2)
    rotation, _ = torch.linalg.qr(torch.randn(SIZE, SIZE).double())
    assert likeness(x, y).cka == pytest.approx(likeness(x, 0.3 * y @ rotation).cka, abs=EXACT)


def test_a_stream_is_like_itself():
    x, _ = streams(2)
    for features in (x, x.float(), x.bfloat16()):
        found = likeness(features, features.clone())
        # Products within a batch are fp32 for the narrower types.
        assert found.cka == pytest.approx(1, abs=1e-5)
        assert found.matched == found.best == pytest.approx(1, abs=1e-5)


def test_the_best_matching_is_left_out_where_nobody_asks():
    assert compare(counted(streams(2)), best=False)[0, 1].best is None


def test_features_that_never_vary_are_counted_and_correlate_with_nothing():
    x, y = streams(2)
    x[:, 2], y[:, :2] = 7.5, 0.0
    found = likeness(x, y)
    assert (found.constant_first, found.constant_second) == (1, 2)
    assert found.cka == pytest.approx(naive_cka.cka(x, y), abs=EXACT)
    alive = [naive_cka.matched(x[:, [j]], y[:, [j]]) for j in (3, 4, 5)]
    assert found.matched == pytest.approx(sum(alive) / SIZE, abs=EXACT)


@pytest.mark.parametrize("value", [0.0, 1234.56])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cka_with_a_stream_that_never_varies_is_undefined(value, dtype):
    x, y = streams(2)
    constant = torch.full_like(x, value)
    for first, second in ((x, constant), (constant, y), (constant, constant)):
        found = likeness(first.to(dtype), second.to(dtype))
        assert found.cka is None
        assert found.matched == found.best == 0


def test_independent_features_show_the_share_that_the_page_states():
    x, y = torch.randn(2, 400, 100, generator=torch.Generator().manual_seed(1)).double()
    assert likeness(x, y).cka == pytest.approx(100 / (400 + 100), abs=0.01)


def test_streams_that_are_not_the_same_rows_or_not_finite_are_refused():
    x, y = streams(2)
    with pytest.raises(ValueError, match=r"streams of \[61, 60\] rows"):
        StreamMoments(2, SIZE).update([x, y[1:]])
    with pytest.raises(ValueError, match="zip"):
        StreamMoments(3, SIZE).update([x, y])
    with pytest.raises(ValueError, match="0 rows"):
        compare(StreamMoments(2, SIZE))
    y[5, 1] = torch.inf
    assert counted([x, y]).non_finite() == [1]
    with pytest.raises(ValueError, match=r"streams \[1\]"):
        compare(counted([x, y]))
