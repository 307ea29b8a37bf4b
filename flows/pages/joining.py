"""What joining experts in closed form has cost: statistics, repair and routers, side by side."""

from collections.abc import Mapping
from statistics import fmean

from infra.recipe.schema import Recipe
from tasks.engine.costs import read_cost
from tasks.engine.workspace import Workspace
from tasks.methods import METHODS
from upcycle_core.evaluation.report.numbers import number

PARTS: Mapping[str, tuple[str, ...]] = {
    "statistics": ("statistics",),
    "repair": ("repaired", "routed"),
    "routers": ("router",),
}
"""Part of it to the stages that do it."""


def core_seconds(recipe: Recipe, workspace: Workspace) -> dict[str, float]:
    """{part: time times cores of what made it, in whichever run that was}.

    A part that the recipe does not ask for is absent, and one of which some was made elsewhere.
    """
    found: dict[str, float] = {}
    stages = {stage.name: stage for stage in METHODS[recipe.method].stages()}
    for part, names in PARTS.items():
        own = [stages[name] for name in names if name in stages]
        labels = [stage.label(item) for stage in own for item in stage.items(recipe)]
        costs = [read_cost(workspace, label) for label in labels]
        known = [cost.core_seconds for cost in costs if cost is not None]
        if labels and len(known) == len(costs):
            found[part] = sum(known)
    return found


def sentence(*runs: Mapping[str, float]) -> str:
    """What ``core_seconds`` gave, in words, or the mean of several runs; empty where it is nothing.

    Args:
        runs: One, or more of the same recipe.
    """
    parts = [part for part in PARTS if all(part in run for run in runs)] if runs else []
    means = {part: fmean(run[part] for run in runs) for part in parts}
    if not any(means.values()):
        return ""
    words = [f"{part} {number(seconds)}" for part, seconds in means.items()]
    if "repair" in means and means.get("statistics"):
        times = number(means["repair"] / means["statistics"])
        words[parts.index("repair")] += f" ({times} times the statistics)"
    spread = f", mean of {len(runs)} runs" if len(runs) > 1 else ""
    return f"Joining took, in core seconds{spread}: {', '.join(words)}."
