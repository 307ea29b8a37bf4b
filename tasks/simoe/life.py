"""How SIMoE's models live on: instruction sets come, leave and grow; the seed stays.

Experts are found in the dense model, and what no expert uses is pruned: there is no way back to
masks that are open. So whatever is new, the seed is tuned again, on all instructions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.recipe.schema import Recipe
from tasks.dume.life import seed_of
from tasks.engine.artifacts import INSTRUCTIONS
from tasks.engine.life import Life
from tasks.engine.workspace import Workspace
from tasks.simoe.report import figures
from tasks.simoe.sources import sources
from upcycle_core.corpora.families.catalogue import FAMILIES
from upcycle_core.corpora.tuning.config import InstructionSource
from upcycle_core.corpora.tuning.readers import missing_files, read_records
from upcycle_core.corpora.tuning.records import Record


def _modelled(workspace: Workspace) -> tuple[str, ...]:
    """Instruction sets that the workspace's model was tuned on."""
    if not any(name.partition("/")[0] == INSTRUCTIONS for name in workspace.inputs("model")):
        return ()
    params = (workspace.record(INSTRUCTIONS) or {}).get("params", {})
    return tuple(params.get("instructions", {}).get("sources", {}))


def without(recipe: Recipe, name: str) -> Recipe:
    """The recipe without a set of instructions, and without categories that no other set has."""
    given = recipe.instructions
    rest = {label: own for label, own in given.sources.items() if label != name}
    changed: dict[str, Any] = {"sources": rest}
    there = _categories(recipe, rest) if name in given.sources else None
    if there is not None:
        for field in ("unseen", "train_categories"):
            named = getattr(given, field)
            changed[field] = named and tuple(own for own in named if own in there)
        changed["domains"] = {own: label for own, label in given.domains.items() if own in there}
    return replace(recipe, instructions=replace(given, **changed))


def _categories(recipe: Recipe, sources: Mapping[str, InstructionSource]) -> set[str] | None:
    """Those that there are records of; None where that is not known before all are read."""
    folder, found = recipe.text_folder, set[str]()
    for name, source in sources.items():
        if source.dataset is not None or missing_files(name, source, folder):
            return None
        if source.generate is not None:
            found |= set(FAMILIES)
            continue
        read = read_records(name, source, config=recipe.instructions, folder=folder, seed=0)
        found |= {record.category for record in read if isinstance(record, Record)}
    return found or None


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
