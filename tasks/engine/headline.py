"""The numbers that a model is first asked for, flat: what ``dvc metrics`` shows of a workspace."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from infra.durable import read_json, write_atomically
from infra.recipe.schema import Recipe
from tasks.engine.workspace import Workspace

FILE = "metrics.json"
BESIDE = ("oracle", "model_averaging", "seed")
"""Rows whose average stands beside the model's own."""
LEFT_OUT = ("categories", "runs", "groups")


def write_headline(recipe: Recipe, workspace: Workspace) -> None:
    """Write ``metrics.json`` beside the artifacts, of the report that is published."""
    metrics = read_json(workspace.path("report") / FILE)
    if isinstance(metrics, dict):
        numbers = headline(metrics, recipe.method)
        write_atomically(workspace.root / FILE, json.dumps(numbers, indent=1) + "\n")


def headline(metrics: Mapping[str, Any], row: str) -> dict[str, float]:
    """About ten numbers of a report.

    Args:
        metrics: The report's, of perplexity or of answers.
        row: The model's.
    """
    averages = metrics.get("normalised_average", {})
    found = {f"normalised_average.{r}": averages[r] for r in (row, *BESIDE) if r in averages}
    worst = metrics.get("worst_domain", {}).get(row)
    if worst is not None:
        found["normalised_worst"] = worst["normalised"]
    found |= _flat("perplexity", metrics.get("perplexity", {}).get(row))
    return found | _flat("", metrics.get("rows", {}).get(row))


def _flat(name: str, value: Any) -> dict[str, float]:
    return dict(_numbers(name, value))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Numbers by dotted name; of several runs their mean."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, Mapping) and value.keys() >= {"mean", "deviation"}:
        yield from _numbers(name, value["mean"])
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in LEFT_OUT:
                yield from _numbers(f"{name}.{key}".lstrip("."), inner)
