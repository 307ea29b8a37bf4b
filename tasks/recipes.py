"""Recipes with every method's checks: what flows and stages read them with."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from infra.recipe import reading
from infra.recipe.schema import Recipe
from tasks.engine.method import Addition, Method
from tasks.methods import ADDITIONS, METHODS
from upcycle_core.errors import Fault
from upcycle_core.evaluation.text.results import expert_row


def load_recipe(path: Path, overrides: Sequence[str] = (), *, added: Sequence[Path] = ()) -> Recipe:
    """Read a recipe; see ``infra.recipe.reading.load_recipe``."""
    return reading.load_recipe(path, overrides, added=added, checks=faults)


def validate(values: object) -> Recipe:
    """Turn plain values into a recipe; see ``load_recipe``."""
    return reading.validate(values, checks=faults)


def faults(recipe: Recipe) -> Iterator[Fault]:
    """What the methods, and what runs on their models, say against a recipe."""
    if recipe.method not in METHODS:
        yield Fault("method", recipe.method, f"no method; use one of {list(METHODS)}")
        return
    parts: tuple[Method | Addition, ...] = (*METHODS.values(), *ADDITIONS)
    for part in parts:
        yield from part.checks(recipe)
    yield from _gate_faults(recipe)


def _gate_faults(recipe: Recipe) -> Iterator[Fault]:
    gate = recipe.registry.gate
    for metric, points in gate.tolerances.items():
        if points < 0:
            yield Fault(f"registry.gate.tolerances.{metric}", points, "must not be negative")
    on_text = METHODS[recipe.method].figures(recipe)
    known = [*on_text, *(f"task.{name}" for name in recipe.tasks)]
    if any(task.domain is not None for task in recipe.tasks.values()):
        known.append("task_average")
    for metric in gate.metrics:
        where = "metric" if metric == gate.metric else "tolerances"
        if metric not in known:
            yield Fault(f"registry.gate.{where}", metric, f"not measured; use one of {known}")
        elif metric not in on_text:
            needed = [recipe.method, *_normalising(recipe, metric)]
            missing = [model for model in needed if model not in recipe.scored_models]
            if missing:
                remedy = f"the gate's {metric} needs {missing} as well; add them"
                yield Fault("task_evaluation.models", list(recipe.scored_models), remedy)


def _normalising(recipe: Recipe, metric: str) -> list[str]:
    """The experts whose scores a task figure is divided by."""
    if metric != "task_average":
        return []
    domains = {task.domain for task in recipe.tasks.values() if task.domain is not None}
    return [expert_row(domain) for domain in sorted(domains)]
