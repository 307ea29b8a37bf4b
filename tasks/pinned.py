"""What is built upon as it is: whether it is there as it was, and is what the recipe asks for."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from infra.recipe import Recipe
from tasks.workspace import Workspace
from upcycle_core.errors import Fault

MAY_CHANGE = ("compute", "moe")
"""Settings that change no weight of what is built upon."""
REBUILD = "or build all anew: flows.dume --rebuild"


def pinned_faults(
    recipe: Recipe,
    workspace: Workspace,
    artifact: str,
    *,
    record: Mapping[str, Any] | None,
    asked: Mapping[str, Any],
) -> Iterator[Fault]:
    """Hold an artifact against the recipe's lineage, and what it was made by against the recipe.

    Args:
        recipe: At work.
        workspace: Where the artifact is.
        artifact: ``seed``.
        record: What made it; None if it is absent or damaged.
        asked: {dotted key: value} of the recipe that would decide it now.
    """
    if record is None or workspace.digest(artifact) != recipe.pinned[artifact]:
        remedy = "is built upon and is not there as it was; bring it back (dvc pull --force in the "
        yield Fault("lineage.pinned", artifact, f"{remedy}workspace, or flows.restore), {REBUILD}")
        return
    if artifact == "backbone":
        yield from _average_faults(recipe)
        return
    made = record.get("params", {})
    for name, value in json.loads(json.dumps(asked)).items():
        if name.partition(".")[0] not in MAY_CHANGE and name in made:
            for key, before, now in _other(name, made[name], value):
                remedy = f"{artifact} is built upon and was made with {before!r}; put that back, "
                yield Fault(key, now, remedy + REBUILD)


def _average_faults(recipe: Recipe) -> Iterator[Fault]:
    """A backbone that averages other experts of the recipe's domains than it asks for."""
    asked, averaged = recipe.backbone.experts, set(recipe.averaged)
    if asked is not None and set(asked) != averaged & set(recipe.domains):
        remedy = f"the backbone is built upon and averages {', '.join(sorted(averaged))}; leave it "
        yield Fault("backbone.experts", ", ".join(asked), f"{remedy}out, {REBUILD}")


def _other(key: str, made: Any, asked: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two settings differ: key, and both values.

    What one of them does not know is of another version of the code, and its default.
    """
    if isinstance(made, dict) and isinstance(asked, dict):
        for name in sorted(made.keys() & asked.keys()):
            yield from _other(f"{key}.{name}", made[name], asked[name])
    elif made != asked:
        yield key, made, asked
