"""Differences between two models on the same items, against a plain loop over resamples."""

import math
import random
import warnings

import numpy as np
import pytest
from scipy import stats

from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks import paired
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.paired import paired_difference, won_and_lost


def item(name, score, *, task="sums", subtask="", seed=0, **more):
    texts = {"prompt": f"ask {name}", "target": f"is {name}", "response": f"said {score}"}
    about = {"category": "", "metric": "acc", **texts, **more}
    return Item(task=task, subtask=subtask, id=str(name), seed=seed, score=float(score), **about)


def scored(scores, **more):
    return [item(name, score, **more) for name, score in enumerate(scores)]


def bootstrap(differences, *, confidence, resamples=10_000):
    """The percentile interval, one resample at a time."""
    rng = np.random.default_rng(12345)
    means = []
    for _ in range(resamples):
        drawn = [differences[i] for i in rng.integers(0, len(differences), len(differences))]
        means.append(sum(drawn) / len(drawn))
    tail = 50 * (1 - confidence)
    return np.percentile(means, tail), np.percentile(means, 100 - tail)


def correlated():
    """Scores of two models that mostly agree: pairing them narrows the interval."""
    chance = random.Random(3)
    first = [float(chance.random() < 0.6) for _ in range(200)]
    second = [1 - score if chance.random() < 0.15 else score for score in first]
    return first, second


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_interval_is_the_percentile_bootstrap_s(confidence):
    first, second = correlated()
    found = paired_difference(scored(first), scored(second), confidence=confidence)
    differences = [one - other for one, other in zip(first, second, strict=True)]
    low, high = bootstrap(differences, confidence=confidence)
    assert found.mean == pytest.approx(sum(differences) / 200, abs=1e-12)
    # One item moves a mean by 0.005, the drawing moves the ends by less; the width is above 0.06.
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.0051)
    assert found.items == 200


def test_few_resamples_are_held_at_once_and_the_interval_stays_the_same(monkeypatch):
    first, second = map(scored, correlated())
    whole, drawn = paired_difference(first, second, resamples=500), []
    bootstrap_of_scipy = stats.bootstrap

    def recording(data, statistic, **options):
        drawn.append(options["batch"] * len(data[0]))
        return bootstrap_of_scipy(data, statistic, **options)

    monkeypatch.setattr(paired, "_CELLS", 1000)
    monkeypatch.setattr(stats, "bootstrap", recording)
    assert paired_difference(first, second, resamples=500) == whole
    assert drawn == [1000]


def test_order_of_items_does_not_matter_for_pairing():
    first, second = map(scored, correlated())
    shuffled = random.Random(1).sample(second, len(second))
    assert paired_difference(first, shuffled) == paired_difference(first, second)


def test_seeds_of_an_item_are_averaged_first():
    first = [item("a", 1), item("a", 0, seed=1), item("b", 1), item("b", 1, seed=1)]
    second = [item("b", 0, seed=9), item("a", 0, seed=9)]
    found = paired_difference(first, second)
    assert found.mean == pytest.approx((0.5 + 1.0) / 2)
    assert found.items == 2
    assert (found.low, found.high) == (0.5, 1.0)


def test_equal_differences_have_no_spread_and_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = paired_difference(scored([0.1] * 7), scored([0.0] * 7))
        single = paired_difference(scored([1]), scored([0]))
    assert (same.mean, same.low, same.high) == (0.1, 0.1, 0.1)
    assert (single.mean, single.low, single.high) == (1.0, 1.0, 1.0)


def test_a_difference_is_clear_when_its_interval_excludes_zero():
    assert paired_difference(scored([1] * 9 + [0]), scored([0] * 10)).excludes_zero
    assert paired_difference(scored([0] * 10), scored([1] * 9 + [0])).excludes_zero
    assert not paired_difference(scored([1, 0, 1]), scored([0, 1, 0])).excludes_zero
    assert not paired_difference(scored([1, 1]), scored([1, 1])).excludes_zero


def test_the_same_id_in_another_task_or_subtask_is_another_item():
    first = [item(1, 1), item(1, 0, subtask="b"), item(1, 0, task="words")]
    assert paired_difference(first, list(reversed(first))).mean == 0
    assert paired_difference(first, list(reversed(first))).items == 3


def test_items_of_one_side_alone_are_named_the_first_few():
    first = scored([1] * 6)
    with pytest.raises(InputError) as caught:
        paired_difference(first, [*first[5:], item("new", 1, subtask="part")])
    message = str(caught.value)
    assert "sums/0, sums/1, sums/2 and 2 more" in message
    assert "only the first model" in message
    assert "sums/part/new" in message
    assert "only the second model" in message


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ([item("a", 1), item("a", 0)], [item("a", 1)], "sums/a.*more than once"),
        ([item("a", 1)], [item("a", 1, target="else")], "sums/a.*right answer differs"),
        ([item("a", 1)], [item("a", 1, metric="f1")], "sums/a.*different metrics"),
        ([item("a", 1)], [item("a", math.nan)], "sums/a.*not a finite number"),
        ([], [], "no items"),
    ],
)
def test_what_cannot_be_compared_is_refused(first, second, complaint):
    for compare in (paired_difference, won_and_lost):
        with pytest.raises(InputError, match=complaint):
            compare(first, second)


def test_won_and_lost_are_the_items_that_differ_largest_gain_first():
    first = [item("c", 0), item("b", 1), item("a", 1), item("d", 1), item("e", 0.4)]
    second = [item("c", 1), item("b", 0), item("a", 0), item("d", 1), item("e", 0)]
    flips = won_and_lost(first, second)
    assert [(flip.id, flip.gain) for flip in flips] == [("a", 1), ("b", 1), ("e", 0.4), ("c", -1)]
    worst = flips[-1]
    assert (worst.prompt, worst.target) == ("ask c", "is c")
    assert (worst.first_response, worst.second_response) == ("said 0", "said 1")
    assert (worst.first_score, worst.second_score) == (0.0, 1.0)


def test_a_lower_score_wins_where_lower_is_better():
    first, second = [item("a", 3), item("a", 1, task="words")], [item("a", 5), item("a", 0)]
    second[1] = item("a", 0, task="words")
    flips = won_and_lost(first, second, lower_is_better=["sums"])
    assert [(flip.task, flip.gain) for flip in flips] == [("sums", 2), ("words", 1)]


def test_a_flip_shows_the_answers_of_the_first_seed():
    first = [item("a", 0, seed=2, response="late"), item("a", 1, seed=1, response="early")]
    (flip,) = won_and_lost(first, [item("a", 0)])
    assert (flip.first_response, flip.first_score) == ("early", 0.5)
