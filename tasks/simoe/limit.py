"""Rows that ``tuning.least_exact_match`` is asked of."""

from collections.abc import Mapping

from infra.recipe.schema import Recipe
from upcycle_core.baselines.config import Baseline


def held_to_limit(recipe: Recipe) -> Mapping[str, Baseline]:
    """Rows that train all weights: where these stay below, the instructions are too hard."""
    return {
        name: row
        for name, row in recipe.baselines.items()
        if row.method == "full-finetune" and row.tuned == "full"
    }


def unchecked(recipe: Recipe) -> list[str]:
    """What to say of a limit that nothing is held to, a line; none where there is no such thing."""
    least = recipe.tuning.least_exact_match
    if least is None or held_to_limit(recipe):
        return []
    remedy = "checks nothing: no row trains all weights; add one (method: full-finetune)"
    return [f"WARNING: tuning.least_exact_match = {least:g} {remedy}"]
