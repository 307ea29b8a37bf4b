"""The token budget of a comparison: every row may see the same number of tokens after the seed."""

from collections.abc import Iterator
from dataclasses import replace

from infra.recipe.schema import Recipe
from upcycle_core.baselines.config import Baseline
from upcycle_core.errors import Fault


def with_budget(recipe: Recipe) -> Recipe:
    """The recipe with each baseline's steps as the budget has them; without one, as it is.

    The tokens of the experts that a baseline begins with are spent already; what is left is rounded
    down to whole steps.
    """
    budget = recipe.comparison.tokens
    if budget is None:
        return recipe
    baselines = {
        name: replace(row, training=replace(row.training, steps=_steps(recipe, row, budget)))
        if row.trains
        else row
        for name, row in recipe.baselines.items()
    }
    return replace(recipe, baselines=baselines)


def budget_faults(recipe: Recipe) -> Iterator[Fault]:
    """Rows that the budget leaves nothing, or no more than their warm-up."""
    budget = recipe.comparison.tokens
    if budget is None:
        return
    for name, row in recipe.baselines.items():
        needed = row.training.warmup_steps + 1
        if row.trains and _steps(recipe, row, budget) < needed:
            spent = recipe.expert_tokens if row.uses_experts else 0
            yield Fault(
                "comparison.tokens",
                budget,
                f"baselines.{name} needs {needed} steps of {row.training.step_tokens} tokens, and "
                f"its experts have seen {spent}; give {spent + needed * row.training.step_tokens} "
                "or more, or lower its warmup_steps",
            )


def _steps(recipe: Recipe, row: Baseline, budget: int) -> int:
    spent = recipe.expert_tokens if row.uses_experts else 0
    return (budget - spent) // row.training.step_tokens
