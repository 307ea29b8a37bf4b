"""Two models on the same items: how far they are apart, and which items one wins from the other."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.tasks.items import Item

Key = tuple[str, str, str]
"""Task, subtask and id: what names an item, whichever model answered it."""

_CELLS = 2**22
"""Resampled values held at once: 32 MiB."""
_NAMED = 3
"""Items that an error names before it only counts them."""


@dataclass(frozen=True)
class Difference:
    """The first model's score minus the second's, averaged over items, in the metric's unit.

    Args:
        mean: The mean difference.
        low: Lower end of its confidence interval.
        high: Upper end.
        items: Items that both models answered.
    """

    mean: float
    low: float
    high: float
    items: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval says that the models differ."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Flip:
    """An item that two models score differently; scores are means over seeds.

    Args:
        task, subtask, id, prompt, target: The item, as the first model was given it.
        first_response, second_response: What each answered with its first seed.
        first_score, second_score: What each scored.
        gain: By how much the first is better, whichever way the metric points; negative if worse.
    """

    task: str
    subtask: str
    id: str
    prompt: str
    target: str
    first_response: str
    second_response: str
    first_score: float
    second_score: float
    gain: float


def paired_difference(
    first: Sequence[Item],
    second: Sequence[Item],
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
) -> Difference:
    """The mean difference with a percentile bootstrap interval over items.

    An item's seeds are averaged before, so that the interval speaks of other items of the same
    task, not of other seeds.

    Args:
        first: One model's items.
        second: Another's, with the same items in any order.
        resamples: Samples of items that are drawn with replacement.
        confidence: Share of resampled means inside the interval.

    Raises:
        InputError: An item that only one model has, an item twice with one seed, two different
            items under one name, a score that is not a number, or no items at all.
    """
    pairs = _pairs(first, second)
    differences = np.array([one - other for one, other in map(_scores, pairs.values())])
    mean = math.fsum(differences) / len(differences)
    if np.ptp(differences) == 0:
        # Every resample is the same; the sum above may be off by a rounding.
        value = float(differences[0])
        return Difference(value, value, value, len(differences))
    from scipy import stats  # takes half a second, which few who import this need

    found = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, _CELLS // len(differences)),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Difference(mean, float(found.low), float(found.high), len(differences))


def won_and_lost(
    first: Sequence[Item], second: Sequence[Item], *, lower_is_better: Collection[str] = ()
) -> list[Flip]:
    """The items whose scores differ, largest gain of the first first, ties by task and id.

    Args and Raises as ``paired_difference``, and

        lower_is_better: Tasks whose metric is better when lower.
    """
    flips = []
    for (task, subtask, name), (own, others) in _pairs(first, second).items():
        mine, theirs = _scores((own, others))
        if mine == theirs:
            continue
        flips.append(
            Flip(
                task=task,
                subtask=subtask,
                id=name,
                prompt=own[0].prompt,
                target=own[0].target,
                first_response=own[0].response,
                second_response=others[0].response,
                first_score=mine,
                second_score=theirs,
                gain=theirs - mine if task in lower_is_better else mine - theirs,
            )
        )
    return sorted(flips, key=lambda flip: (-flip.gain, flip.task, flip.subtask, flip.id))


def _pairs(
    first: Sequence[Item], second: Sequence[Item]
) -> dict[Key, tuple[list[Item], list[Item]]]:
    """{item: both models' answers, seeds ascending}, in the first model's order."""
    ours, theirs = _by_key(first), _by_key(second)
    if not ours and not theirs:
        raise InputError(Fault("items", [], "no items; keep those of both models"))
    pairs = {key: (own, theirs[key]) for key, own in ours.items() if key in theirs}
    remedy = "only the {} model was asked; compare models that were evaluated on the same items"
    _refuse(
        {
            remedy.format("first"): [key for key in ours if key not in theirs],
            remedy.format("second"): [key for key in theirs if key not in ours],
            "the right answer differs, so these are other items under the same name; "
            "evaluate both models on the same data": [
                key for key, (own, other) in pairs.items() if own[0].target != other[0].target
            ],
            "the two scores are of different metrics; evaluate both with the same recipe": [
                key for key, (own, other) in pairs.items() if own[0].metric != other[0].metric
            ],
        }
    )
    return pairs


def _by_key(items: Sequence[Item]) -> Mapping[Key, list[Item]]:
    found: dict[Key, dict[int, Item]] = {}
    twice, unscored = [], []
    for item in items:
        key = (item.task, item.subtask, item.id)
        answers = found.setdefault(key, {})
        if item.seed in answers:
            twice.append(key)
        if not math.isfinite(item.score):
            unscored.append(key)
        answers[item.seed] = item
    _refuse(
        {
            "more than once with one seed; give every item of a task its own id": twice,
            "the score is not a finite number; the model is broken": unscored,
        }
    )
    return {key: [answers[seed] for seed in sorted(answers)] for key, answers in found.items()}


def _refuse(broken: Mapping[str, Sequence[Key]]) -> None:
    """One fault a remedy with items that need it: it names the first few, counts the others."""
    faults = []
    for remedy, keys in broken.items():
        names = ["/".join(part for part in key if part) for key in keys[:_NAMED]]
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        faults += [Fault("items", ", ".join(names) + more, remedy)] if keys else []
    raise_faults(faults)


def _scores(pair: tuple[Sequence[Item], Sequence[Item]]) -> tuple[float, float]:
    first, second = ([item.score for item in items] for items in pair)
    return math.fsum(first) / len(first), math.fsum(second) / len(second)
