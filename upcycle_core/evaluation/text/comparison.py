"""Several ways of making one model, side by side: what each scores, holds and was trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upcycle_core.evaluation.text import scores

COUNTS = ("trained_parameters", "active_parameters", "total_parameters", "tokens")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row: a model, and how it came about.

    Args:
        title: What people call it.
        perplexities: {domain: perplexity}.
        trained_parameters: Parameters that were trained after assembly, once; 0 without training.
        active_parameters: Parameters that one token meets.
        total_parameters: Parameters of the model, of all models for an ensemble.
        tokens: Training tokens after the seed, those of the experts it began with included; None
            where they are unknown.
    """

    title: str
    perplexities: Mapping[str, float]
    trained_parameters: int
    active_parameters: int
    total_parameters: int
    tokens: int | None


def comparison_metrics(
    experts: Mapping[str, float], rows: Mapping[str, Compared]
) -> dict[str, dict[str, Any]]:
    """Everything about each row, as plain values: the content of metrics.json.

    Args:
        experts: {domain: perplexity of its own dense expert}, what rows are normalised by.
        rows: {name: row}, in the order they are shown.

    Returns:
        {name: {"title", "perplexity", "normalised", "normalised_average" and ``COUNTS``}}.

    Raises:
        InputError: A domain or a finite perplexity is missing.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        normalised = scores.normalised(row.perplexities, experts)
        found[name] = {
            "title": row.title,
            "perplexity": {domain: row.perplexities[domain] for domain in experts},
            "normalised": normalised,
            "normalised_average": scores.average(normalised),
            **{count: getattr(row, count) for count in COUNTS},
        }
    return found


def across_seeds(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Runs of one comparison with several seeds as one: {row: {column: (mean, deviation), ...}}.

    Args:
        runs: One ``comparison_metrics`` a seed, with "core_seconds" and "peak_memory_bytes" added
            to the rows whose cost is known.

    Returns:
        {row: {"title", "scores": {domain or "average": (mean, sample standard deviation)}, the
        ``COUNTS`` of the first run, "core_seconds": mean or None, "peak_memory_bytes": largest or
        None}}.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, first in runs[0].items():
        every = [run[name] for run in runs]
        columns = {
            domain: scores.mean_and_deviation([row["normalised"][domain] for row in every])
            for domain in first["normalised"]
        }
        averages = [row["normalised_average"] for row in every]
        seconds = [row["core_seconds"] for row in every if "core_seconds" in row]
        memory = [row["peak_memory_bytes"] for row in every if "peak_memory_bytes" in row]
        found[name] = {
            **{key: first[key] for key in ("title", *COUNTS)},
            "scores": {**columns, "average": scores.mean_and_deviation(averages)},
            "core_seconds": sum(seconds) / len(runs) if len(seconds) == len(runs) else None,
            "peak_memory_bytes": max(memory) if len(memory) == len(runs) else None,
        }
    return found
