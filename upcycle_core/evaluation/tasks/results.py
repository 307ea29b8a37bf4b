"""What several models scored on tasks, and the numbers that follow. Nothing here is measured."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from upcycle_core.errors import Fault
from upcycle_core.evaluation.tasks import paired
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.paired import Flip
from upcycle_core.evaluation.tasks.score import TaskScore
from upcycle_core.evaluation.text import scores
from upcycle_core.evaluation.text.results import Parameter, expert_row

LARGEST_SHARE = 1 + 1e-9
"""A mean of ones may be off by a rounding."""


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Several models on the same tasks. Plain data: the same inputs give the same files.

    Args:
        tasks: The tasks, in the order they are shown.
        titles: {row: what people call it}.
        scores: {row: {task: score}}, rows in the order they are shown. The rows of dense experts
            are ``expert_row(domain)``. A row need not have every task.
        domains: {task: domain whose own dense expert normalises it}; tasks without one are shown
            but not normalised.
        items: {row: its items}.
        subject: The row that the page is about.
        rivals: The rows that the subject is compared with item by item.
        sweeps: {parameter: {value: {task: score}}}: the subject with one parameter set to others.
    """

    tasks: tuple[str, ...]
    titles: Mapping[str, str]
    scores: Mapping[str, Mapping[str, TaskScore]]
    domains: Mapping[str, str] = field(default_factory=dict)
    items: Mapping[str, Sequence[Item]] = field(default_factory=dict)
    subject: str
    rivals: tuple[str, ...] = ()
    sweeps: Mapping[Parameter, Mapping[float, Mapping[str, TaskScore]]] = field(
        default_factory=dict
    )


def faults(evaluation: TaskEvaluation) -> list[Fault]:
    """Everything that keeps a report from being made: what is missing or does not fit together."""
    found = [
        Fault(name, row, "no row of the scores; evaluate this model too")
        for name, row in (
            ("subject", evaluation.subject),
            *(("rivals", rival) for rival in evaluation.rivals),
            *(("items", row) for row in evaluation.items),
        )
        if row not in evaluation.scores
    ]
    if not evaluation.tasks:
        found.append(Fault("tasks", evaluation.tasks, "nothing to show; name a task at least"))
    if evaluation.subject in evaluation.rivals:
        found.append(Fault("rivals", evaluation.subject, "the subject itself; leave it out"))
    points = {
        f"{parameter} = {value:g}": own
        for parameter, swept in evaluation.sweeps.items()
        for value, own in swept.items()
    }
    for task in evaluation.tasks:
        measured = {row: own[task] for row, own in evaluation.scores.items() if task in own}
        kinds = sorted({(score.metric, score.higher_is_better) for score in measured.values()})
        if len(kinds) != 1:
            remedy = "one metric is needed for all models; evaluate them with the same recipe"
            found.append(Fault(f"scores.{task}", [metric for metric, _ in kinds], remedy))
        for point, own in points.items():
            if task in own:
                measured[point] = own[task]
            else:
                found.append(Fault(f"sweeps.{point}", task, "no score; evaluate every task"))
        for row, score in measured.items():
            if not score.values or not all(map(math.isfinite, score.values)):
                remedy = "no finite score for every seed; the model is broken"
                found.append(Fault(f"scores.{row}.{task}", score.values, remedy))
    return found


def metrics(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Everything derived, as nested plain dicts: the content of metrics.json.

    Returns:
        {"subject", "rivals", "titles": {row: title},
        "tasks": {task: {"metric", "higher_is_better", "is_share", "domain", "items", "seeds"}},
        "scores": {row: {task: a ``TaskScore`` as a dict, with its "mean" and "deviation"}},
        "normalised": {row: {task: percent, None where undefined}},
        "normalised_average": {row: percent, None where undefined},
        "deviation": {row: {task or "average": deviation of the normalised score}}, where there are
        several seeds,
        "undefined": {task: why it cannot be normalised},
        "sweeps": {parameter: [{"value", "scores": {task: mean}, "normalised_average": percent, None
        where undefined}]}, where there are any,
        "differences": {rival: {task: {"mean", "low", "high", "items", "metric", "excludes_zero",
        "won", "lost"}}}}. Scores and differences are in the metric's own unit; mean and interval of
        a task are None where its score is no mean over items, as bits per byte or mcc.

    Raises:
        InputError: The subject and a rival have different items (see ``paired_difference``).
    """
    kept: dict[str, Any] = {
        "subject": evaluation.subject,
        "rivals": list(evaluation.rivals),
        "titles": {row: evaluation.titles.get(row, row) for row in evaluation.scores},
        "tasks": {task: _task(evaluation, task) for task in evaluation.tasks},
        "scores": {
            row: {task: _score(own[task]) for task in evaluation.tasks if task in own}
            for row, own in evaluation.scores.items()
        },
    }
    derived = {**_normalised(evaluation), "differences": _differences(evaluation)}
    sweeps = {name: _points(evaluation, points) for name, points in evaluation.sweeps.items()}
    return {**kept, **derived, **({"sweeps": sweeps} if sweeps else {})}


def flips(evaluation: TaskEvaluation) -> dict[str, list[Flip]]:
    """{rival: the items that the subject wins from it or loses to it, largest gain first}.

    Raises:
        InputError: The subject and a rival have different items (see ``paired_difference``).
    """
    metric = {task: _task(evaluation, task) for task in evaluation.tasks}
    lower = [task for task, about in metric.items() if not about["higher_is_better"]]
    found = {}
    for rival in evaluation.rivals:
        shared = _shared(evaluation, rival).values()
        ours = [item for own, _ in shared for item in own]
        theirs = [item for _, other in shared for item in other]
        found[rival] = paired.won_and_lost(ours, theirs, lower_is_better=lower) if ours else []
    return found


def is_share(evaluation: TaskEvaluation, task: str) -> bool:
    """Whether a task's metric is a rate from 0 to 1, which is shown in percent.

    Some metrics of the harness (``bleu_max``, ``eq_bench``) are in points of 100 already: values
    beyond 1 tell. Where less is better it is no rate.
    """
    measured = [own[task] for own in evaluation.scores.values() if task in own]
    values = [value for score in measured for value in score.values]
    values += [i.score for own in evaluation.items.values() for i in own if i.task == task]
    return measured[0].higher_is_better and all(abs(value) <= LARGEST_SHARE for value in values)


def _task(evaluation: TaskEvaluation, task: str) -> dict[str, Any]:
    measured = [own[task] for own in evaluation.scores.values() if task in own]
    return {
        "metric": measured[0].metric,
        "higher_is_better": measured[0].higher_is_better,
        "is_share": is_share(evaluation, task),
        "domain": evaluation.domains.get(task),
        "items": max(score.items for score in measured),
        "seeds": max(len(score.values) for score in measured),
    }


def _score(score: TaskScore) -> dict[str, Any]:
    mean, deviation = scores.mean_and_deviation(score.values)
    return {"mean": mean, "deviation": deviation, **score.to_dict()}


def _normalised(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Scores in percent of what each domain's own dense expert reaches (DUME, "Metrics").

    100/D sum_d p_d / p_expert_d, inverted for metrics that are better when lower; seed by seed, as
    in the paper's Table 3, where an expert of three seeds is at 100.0 ± 0.0.
    """
    tasks = [task for task in evaluation.tasks if task in evaluation.domains]
    experts = {task: _expert(evaluation, task) for task in tasks}
    found: dict[str, dict[str, Any]] = {"normalised": {}, "normalised_average": {}, "deviation": {}}
    for row, own in evaluation.scores.items() if tasks else ():
        cells = {task: _ratios(own.get(task), experts[task]) for task in tasks}
        shown = {**cells, "average": _average(cells, evaluation.domains)}
        both = {name: scores.mean_and_deviation(v) if v else (None, 0) for name, v in shown.items()}
        found["normalised_average"][row] = both["average"][0]
        found["normalised"][row] = {task: both[task][0] for task in tasks}
        spread = {name: both[name][1] for name, v in shown.items() if v and len(v) > 1}
        found["deviation"] |= {row: spread} if spread else {}
    undefined = {task: _undefined(evaluation, task) for task in tasks}
    return {**found, "undefined": {task: why for task, why in undefined.items() if why}}


def _points(
    evaluation: TaskEvaluation, points: Mapping[float, Mapping[str, TaskScore]]
) -> list[dict[str, Any]]:
    """A sweep, ascending."""
    found = []
    for value, own in sorted(points.items()):
        cells = {task: _ratios(own[task], _expert(evaluation, task)) for task in evaluation.domains}
        averages = _average(cells, evaluation.domains) if cells else None
        average = scores.mean_and_deviation(averages)[0] if averages else None
        means = {task: score.mean for task, score in own.items()}
        found.append({"value": value, "scores": means, "normalised_average": average})
    return found


def _expert(evaluation: TaskEvaluation, task: str) -> TaskScore | None:
    return evaluation.scores.get(expert_row(evaluation.domains[task]), {}).get(task)


def _undefined(evaluation: TaskEvaluation, task: str) -> str:
    expert, domain = _expert(evaluation, task), evaluation.domains[task]
    if expert is None:
        return f"the {domain} expert was not evaluated on it"
    return "" if _ratios(expert, expert) else f"the {domain} expert scores {min(expert.values):g}"


def _ratios(own: TaskScore | None, expert: TaskScore | None) -> list[float] | None:
    """One percentage a seed; None where it is undefined."""
    if own is None or expert is None:
        return None
    same = len(own.values) == len(expert.values)
    references = expert.values if same else (expert.mean,) * len(own.values)
    pairs = list(zip(own.values, references, strict=True))
    if not expert.higher_is_better:
        pairs = [(reference, value) for value, reference in pairs]
    if any(below <= 0 for _, below in pairs) or min(expert.values) <= 0:
        return None
    return [100 * (above / below) for above, below in pairs]


def _average(
    cells: Mapping[str, list[float] | None], domains: Mapping[str, str]
) -> list[float] | None:
    """The mean over domains, one a seed; a task with a single value counts with it in every seed.

    Tasks of one domain are averaged first. None where a task is undefined; one value where tasks
    have different numbers of seeds.
    """
    known = {task: values for task, values in cells.items() if values}
    if len(known) < len(cells):
        return None
    seeds = max(map(len, known.values()))
    if any(len(values) not in (1, seeds) for values in known.values()):
        known, seeds = {task: [math.fsum(v) / len(v)] for task, v in known.items()}, 1
    sizes = Counter(domains[task] for task in known)
    return [
        math.fsum(
            values[seed % len(values)] / sizes[domains[task]] for task, values in known.items()
        )
        / len(sizes)
        for seed in range(seeds)
    ]


def _differences(evaluation: TaskEvaluation) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for rival, flipped in flips(evaluation).items():
        won = Counter(flip.task for flip in flipped if flip.gain > 0)
        lost = Counter(flip.task for flip in flipped if flip.gain < 0)
        found[rival] = {}
        for task, (ours, theirs) in _shared(evaluation, rival).items():
            difference = paired.paired_difference(ours, theirs)
            measured = asdict(difference)
            pairs = ((evaluation.subject, ours), (rival, theirs))
            is_mean = all(_is_mean(evaluation.scores[row][task], own) for row, own in pairs)
            if not is_mean:
                measured |= dict.fromkeys(("mean", "low", "high"))
            found[rival][task] = {
                **measured,
                "metric": ours[0].metric,
                "excludes_zero": is_mean and difference.excludes_zero,
                "won": won[task],
                "lost": lost[task],
            }
    return found


def _is_mean(score: TaskScore, items: Sequence[Item]) -> bool:
    """Whether a score is the mean of its items' scores: those of whole texts weigh each by its
    length, mcc and f1 count labels, and a group may weigh its parts alike."""
    mean = math.fsum(item.score for item in items) / len(items)
    return math.isclose(mean, score.mean, rel_tol=1e-6, abs_tol=1e-9)


def _shared(evaluation: TaskEvaluation, rival: str) -> dict[str, tuple[list[Item], list[Item]]]:
    """{task: both models' items}, for the tasks whose items are known of both."""
    found = {}
    for task in evaluation.tasks:
        ours, theirs = (
            [item for item in evaluation.items.get(row, ()) if item.task == task]
            for row in (evaluation.subject, rival)
        )
        if ours and theirs:
            found[task] = (ours, theirs)
    return found
