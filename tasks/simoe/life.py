"""How SIMoE's models live on: instruction sets come, leave and grow; the seed stays.

Experts are found in the dense model, and what no expert uses is pruned: there is no way back to
masks that are open. So whatever is new, the seed is tuned again, on all instructions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.recipe.schema import Recipe
from tasks.dume.life import seed_of
from tasks.engine.life import Life
from tasks.engine.workspace import Workspace
from tasks.simoe.report import figures
from tasks.simoe.sources import sources


def _modelled(workspace: Workspace) -> tuple[str, ...]:
    """Instruction sets that the workspace's model was tuned on."""
    if "instructions" not in workspace.inputs("model"):
        return ()
    params = (workspace.record("instructions") or {}).get("params", {})
    return tuple(params.get("instructions", {}).get("sources", {}))


def without(recipe: Recipe, name: str) -> Recipe:
    """The recipe without a set of instructions."""
    rest = {label: own for label, own in recipe.instructions.sources.items() if label != name}
    return replace(recipe, instructions=replace(recipe.instructions, sources=rest))


def _said(recipe: Recipe) -> str:
    listed = ", ".join(recipe.instructions.sources)
    return f"The seed, which stays, was tuned again, on {listed}."


def _scores(metrics: Mapping[str, Any], method: str) -> Mapping[str, float]:
    return figures(metrics, method)


LIFE = Life(
    pinned=seed_of,
    reads=(sources,),
    part="instruction set",
    section="instructions.sources",
    parts=lambda recipe: recipe.instructions.sources,
    modelled=_modelled,
    without=without,
    came=_said,
    left=lambda recipe, name: _said(recipe),
    scores=_scores,
    measure="answers to held-out instructions, percent",
    percent=False,
)
