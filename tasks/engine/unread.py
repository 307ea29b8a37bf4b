"""Settings that decide nothing of what a recipe makes: nobody else would say so."""

from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.params import NARROWED
from tasks.engine.stage import Stage

LOOKED_AT = (
    *("corpus", "tokenizer", "seed_model", "experts", "backbone", "statistics", "router", "moe"),
    *("evaluation", "task_evaluation", "tuning"),
)
"""Sections that every recipe has, and of which stages name all that they read."""
LATER = "experts.continued"
"""What is read once an expert that is trained here has new text."""

WORK = {
    "seed": ("seed_model.training",),
    "experts": ("experts.training",),
    "post_training": ("post_training.training", "tuning.training"),
    "task_evaluation": ("task_evaluation.batch_size",),
}
"""Settings of which one is read where there is work of a kind."""


def unread(recipe: Recipe, stages: Collection[Stage]) -> list[str]:
    """Dotted keys, of settings or whole sections, that are given and that nothing reads.

    Args:
        recipe: With its method's name.
        stages: All that it asks for.
    """
    recipe = replace(recipe, lineage=None)  # what is built upon is read again by --rebuild
    read = {key for stage in stages for i in stage.items(recipe) for key in stage.keys(recipe, i)}
    if recipe.trains_experts:
        read.add(LATER)
    found = [key for name in LOOKED_AT for key in _unread(getattr(recipe, name), name, read)]
    return found + [f"compute.{kind}" for kind in _idle(recipe, read)]


def _idle(recipe: Recipe, read: Collection[str]) -> Iterator[str]:
    """Kinds of work that something is reserved for, and that there is none of."""
    work = {kind: any(_reads(read, of) for of in keys) for kind, keys in WORK.items()}
    work["baselines"] = bool(recipe.baselines)
    for field in fields(recipe.compute):
        asked = getattr(recipe.compute, field.name)
        if asked != _default(field) and not work.get(field.name, True):
            yield field.name


def _unread(section: Any, key: str, read: Collection[str]) -> Iterator[str]:
    """Keys below that of ``section`` with another value than the default. Fields that say how
    something is computed, and not what, are read with those beside them."""
    if not is_dataclass(section):
        return
    left_out = NARROWED.get(type(section), ()) if _reads(read, f"{key}.") else ()
    for field in fields(section):
        name, value = f"{key}.{field.name}", getattr(section, field.name)
        is_whole = any(f"{name}.".startswith(f"{own}.") for own in read)
        if is_whole or value == _default(field) or field.name in left_out:
            continue
        if _reads(read, f"{name}."):
            yield from _unread(value, name, read)
        else:
            yield name


def _reads(read: Collection[str], start: str) -> bool:
    return any(own.startswith(start) for own in read)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
