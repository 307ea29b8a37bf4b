"""What of a recipe is made already and stays, as its stages will find it: from records alone.

No artifact is read and nothing is written, so that nobody has to hold the workspace.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.life import modelled
from tasks.engine.stage import Stage
from tasks.engine.stage_run import Session
from tasks.engine.workspace import Workspace, enclosing
from tasks.methods import stages_of
from upcycle_core.errors import InputError


class RecordedWorkspace(Workspace):
    """A workspace whose artifacts are taken to be as they were published."""

    def provenance(self, artifact: str) -> dict[str, Any] | None:
        """What made ``artifact``, its files unread; None if it is absent."""
        return self.record(artifact)

    def take_over(self, artifact: str, provenance: Mapping[str, Any]) -> None:
        """Nothing: that is for who holds the workspace."""


def made_before(
    recipe: Recipe, workspace: RecordedWorkspace, changed: Collection[str]
) -> dict[str, int]:
    """{stage: how many of its artifacts are there, and would not be made again}

    What reads something that is made again is taken to be made again too: few things come out of
    other text byte by byte as they were.

    Args:
        recipe: What is to be made, with its lineage.
        workspace: Its own.
        changed: Of ``changed_outside``.
    """
    session = Session(recipe, workspace, log=lambda text: None)
    again, found = set(changed), {}
    for stage in stages_of(recipe):
        items = stage.items(recipe)
        stays = [item for item in items if _stays(session, stage, item, again)]
        if not stage.always:  # of it files alone are read, and those that change are known
            again |= {stage.artifact(item) for item in items if item not in stays}
        found[stage.name] = len(stays)
    return found


def _stays(session: Session, stage: Stage, item: str, again: Collection[str]) -> bool:
    """Whether an artifact is there and would not be made again, where those of ``again`` are."""
    artifact = stage.artifact(item)
    if session.workspace.record(artifact) is None:
        return False
    if stage.always:
        return not again
    if artifact in session.recipe.pinned:  # whether as it was, its flow says
        return True
    read = stage.inputs(session.recipe, item)
    if any(place in again for name in read for place in enclosing(name)):
        return False
    try:
        return stage.is_current(session, item)
    except InputError:  # of an input that is not there
        return False


def learning(recipe: Recipe, workspace: Workspace, changed: Collection[str]) -> Recipe:
    """The recipe with a parent for each expert that learns new text, where a model goes on.

    Flows name them once they have read the text: ``tasks.living.lineage.with_parents``.

    Args:
        recipe: What is to be made, with its lineage.
        workspace: Its own.
        changed: Of ``changed_outside``.
    """
    if recipe.lineage is None:
        return recipe
    parents = {
        name: digest
        for name in modelled(workspace)
        if (domain := recipe.domains.get(name)) is not None
        and domain.expert is None
        and f"sources/{name}.json" in changed
        and (digest := workspace.digest(f"experts/{name}")) is not None
    }
    lineage = replace(recipe.lineage, parents={**recipe.parents, **parents})
    return replace(recipe, lineage=lineage)
