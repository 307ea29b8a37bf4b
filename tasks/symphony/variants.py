"""What a recipe says about Symphony-MoE: its own way to join strangers, and its rows'."""

from collections.abc import Iterator
from dataclasses import replace

from infra.recipe.schema import Recipe
from upcycle_core.symphony.config import SymphonyConfig

SYMPHONY = "symphony"
"""The recipe's own way of joining strangers, among the variants of its baselines."""


def section(recipe: Recipe) -> SymphonyConfig:
    """How the recipe's own model is joined."""
    return recipe.symphony or SymphonyConfig()


def variants(recipe: Recipe) -> dict[str, SymphonyConfig]:
    """Every way in which strangers are joined by Symphony-MoE: the recipe's, and its rows'."""
    rows = {n: row.symphony for n, row in recipe.baselines.items() if row.method == SYMPHONY}
    return {SYMPHONY: section(recipe), **{n: v or SymphonyConfig() for n, v in rows.items()}}


def with_anchors(recipe: Recipe) -> Recipe:
    """The recipe whose rows are joined to its own anchor, where they name none and have it."""
    anchor, rows = section(recipe).anchor, dict(recipe.baselines)
    for name, row in rows.items():
        own = row.symphony or SymphonyConfig()
        if row.method == SYMPHONY and own.anchor is None and anchor in chosen_of(recipe, own):
            rows[name] = replace(row, symphony=replace(own, anchor=anchor))
    return replace(recipe, baselines=rows)


def solves_routers(recipe: Recipe) -> bool:
    """Whether routers are solved by ridge regression, in any way of joining."""
    return any(variant.router == "ridge" for variant in variants(recipe).values())


def starts(recipe: Recipe) -> tuple[str, ...]:
    """What strangers are joined to before training: the recipe's own way, and every row's."""
    return (SYMPHONY, *recipe.baselines)


def pairings(recipe: Recipe) -> dict[str, str]:
    """{variant: the first variant that compares the same models on the same text}.

    Variants that learn nothing from activations are left out.
    """
    first: dict[object, str] = {}
    found = {}
    for name, variant in variants(recipe).items():
        if variant.alignment.uses_activations:
            key = (anchor_of(recipe, variant), variant.calibration)
            found[name] = first.setdefault(key, name)
    return found


def anchor_of(recipe: Recipe, variant: SymphonyConfig) -> str:
    """The domain whose model the others are aligned to: the first that is named, or else by name.

    Domains of a recipe that is still being read are in no order yet.
    """
    return variant.anchor or (variant.models or sorted(recipe.domains))[0]


def chosen_of(recipe: Recipe, variant: SymphonyConfig) -> tuple[str, ...]:
    """The domains whose models become experts, in the recipe's order: that of the experts."""
    named = variant.models
    return tuple(name for name in recipe.domains if named is None or name in named)


def trains_shape(recipe: Recipe) -> bool:
    """Whether any model begins with random weights here."""
    own = (d.origin for d in recipe.domains.values() if d.expert is None)
    return any(origin is None or origin.model is None for origin in own)


def lengths(recipe: Recipe) -> Iterator[str]:
    """Sections whose ``sequence_length`` models must have positions for."""
    yield from ("experts.training", "evaluation")
    if section(recipe).alignment.uses_activations:
        yield "symphony.calibration"
    if solves_routers(recipe):
        yield "statistics"
    if recipe.post_training is not None:
        yield "post_training.training"
