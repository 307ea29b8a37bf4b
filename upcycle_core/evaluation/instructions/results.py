"""What several models scored on instructions, and the numbers that follow. Nothing is measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.instructions.scores import METRICS, SPLITS, Split, SplitScore
from upcycle_core.evaluation.text.scores import mean_and_deviation
from upcycle_core.plain import Plain

COUNTS = (
    "total_parameters",
    "trained_parameters",
    "density_parameters",
    "effective_experts",
    "tasks_apart",
)


@dataclass(frozen=True, kw_only=True)
class Run(Plain):
    """One model of one seed.

    Args:
        total_parameters: What the saved model holds.
        trained_parameters: What was trained; 0 for a model as it was found.
        unseen: Scores on task categories that training did not have.
        seen: Scores on the others; None where they were not asked.
        density_parameters: The paper's way of counting SIMoE: the pre-trained model's and the mean
            density of the masks times the delta's. None for other models.
        effective_experts: exp(H(mean coefficients)) of a SIMoE, 1 to M. None for other models.
        tasks_apart: Of that entropy, the nats that tasks explain: 0 where all use the experts
            alike. None for other models.
    """

    total_parameters: int
    trained_parameters: int
    unseen: SplitScore
    seen: SplitScore | None = None
    density_parameters: int | None = None
    effective_experts: float | None = None
    tasks_apart: float | None = None
    written = (*COUNTS, *SPLITS)


@dataclass(frozen=True, kw_only=True)
class Row(Plain):
    """One line of the table: a model, once a seed.

    Args:
        title: What people call it.
        runs: One a seed, all with the same sets and categories.
        groups: The tables it stands in, such as ``Models`` or ``Ablations``.
    """

    title: str
    runs: tuple[Run, ...]
    groups: tuple[str, ...] = ("Models",)


@dataclass(frozen=True, kw_only=True)
class InstructionEvaluation(Plain):
    """Several models on the same instances. Plain data: the same inputs give the same files.

    ``from_dict`` reads it from the metrics.json that was written of it.

    Args:
        rows: {row: model}, in the order they are shown.
        highlight: The row that the report is about, whose activations are shown.
    """

    rows: Mapping[str, Row]
    highlight: str = "simoe"


def across_runs(evaluations: Sequence[InstructionEvaluation]) -> InstructionEvaluation:
    """Evaluations of several seeds as one: each row has the runs of all.

    Raises:
        InputError: Their rows differ.
    """
    first, *others = evaluations
    faults = [
        Fault(f"evaluations[{place}]", sorted(other.rows), f"give the rows {sorted(first.rows)}")
        for place, other in enumerate(others, 1)
        if set(other.rows) != set(first.rows)
    ]
    raise_faults(faults)
    rows = {
        name: replace(row, runs=tuple(run for e in evaluations for run in e.rows[name].runs))
        for name, row in first.rows.items()
    }
    return replace(first, rows=rows)


def faults(evaluation: InstructionEvaluation) -> list[Fault]:
    """Everything that keeps a report from being made: runs, categories or numbers missing."""
    found = []
    if not evaluation.rows:
        found.append(Fault("rows", None, "nothing to report; evaluate a model"))
    elif evaluation.highlight not in evaluation.rows:
        remedy = f"no row; choose one of {', '.join(evaluation.rows)}"
        found.append(Fault("highlight", evaluation.highlight, remedy))
    asked: dict[tuple[Split, int], tuple[str, dict[str, int]]] = {}
    for name, row in evaluation.rows.items():
        if not row.runs or not row.groups:
            found.append(Fault(f"rows.{name}", row.title, "give it a run and a group at least"))
        if len({run.seen is None for run in row.runs}) > 1:
            remedy = "one run has seen categories, another has not; evaluate them alike"
            found.append(Fault(f"rows.{name}.runs", len(row.runs), remedy))
        for place, split, score in _scores(row):
            field = f"rows.{name}.runs[{place}].{split}"
            counts = {category: own.count for category, own in score.categories.items()}
            # Another seed may draw other questions of the same categories.
            where, expected = asked.setdefault((split, place), (field, counts))
            other, drawn = asked[split, min(run for own, run in asked if own == split)]
            if counts != expected or set(counts) != set(drawn):
                where, expected = (where, expected) if counts != expected else (other, drawn)
                remedy = f"asked other instances than {where}, {expected}; evaluate them alike"
                found.append(Fault(field, counts, remedy))
            found += _number_faults(field, score)
    return found


def metrics(evaluation: InstructionEvaluation) -> dict[str, Any]:
    """{row: everything about it}, as plain values; see ``report.write_instruction_report``."""
    return {name: _row_metrics(row) for name, row in evaluation.rows.items()}


def _row_metrics(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"title": row.title, "groups": list(row.groups)}
    for name in COUNTS:
        values = [getattr(run, name) for run in row.runs]
        found[name] = None if None in values else _spread(values)
    for split in SPLITS:
        scores = [score for run in row.runs if (score := getattr(run, split)) is not None]
        found[split] = _split_metrics(scores) if scores else None
    return {**found, "runs": [run.to_dict() for run in row.runs]}


def _split_metrics(scores: Sequence[SplitScore]) -> dict[str, Any]:
    categories: dict[str, Any] = {}
    for name in scores[0].categories:
        own = [score.categories[name] for score in scores]
        categories[name] = {**_both(own), "count": min(score.count for score in own)}
    return {
        **_both(scores),
        "count": min(score.count for score in scores),
        "truncated": max(score.truncated for score in scores),
        "categories": categories,
    }


def _both(scores: Sequence[Any]) -> dict[str, dict[str, float]]:
    return {metric: _spread([getattr(score, metric) for score in scores]) for metric in METRICS}


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean, deviation = mean_and_deviation(values)
    return {"mean": mean, "deviation": deviation}


def _scores(row: Row) -> Iterator[tuple[int, Split, SplitScore]]:
    for place, run in enumerate(row.runs):
        for split in SPLITS:
            score = getattr(run, split)
            if score is not None:
                yield place, split, score


def _number_faults(field: str, score: SplitScore) -> list[Fault]:
    if not score.categories:
        return [Fault(field, None, "no category; evaluate one at least")]
    return [
        Fault(f"{field}.{category}.{metric}", getattr(own, metric), "must be a share, 0 to 1")
        for category, own in score.categories.items()
        for metric in METRICS
        if not 0 <= getattr(own, metric) <= 1
    ]
