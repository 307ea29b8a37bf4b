"""How sure the scores on a SIMoE's card are."""

import pytest

from tasks.simoe.card import interval


def split(*categories):
    own = {
        str(i): {"exact_match": {"mean": share}, "count": count}
        for i, (share, count) in enumerate(categories)
    }
    mean = sum(share for share, _ in categories) / len(categories)
    return {"categories": own, "exact_match": {"mean": mean}}


@pytest.mark.parametrize("categories", [[(1.0, 1), (0.0, 1)], [(0.0, 10)], [(1.0, 40)]])
def test_few_or_equal_answers_are_not_sure(categories):
    low, high = interval(split(*categories))
    mean = 100 * split(*categories)["exact_match"]["mean"]
    assert low <= mean <= high
    assert high - low > 5


def test_of_many_answers_it_is_the_binomial_s():
    low, high = interval(split((0.3, 10_000)))
    assert (low, high) == pytest.approx((29.1, 30.9), abs=0.01)
    assert interval(split((0.3, 10_000), (0.3, 10_000)))[0] > low
