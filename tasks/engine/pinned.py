"""What is built upon as it is: whether it is there as it was, and is what the recipe asks for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.params import MERGE_KEYS, recorded_setting
from tasks.engine.workspace import Workspace
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.errors import Fault

DECIDE = ("seed", "seed_model", "tokenizer")
"""Settings whose change would make another one. The backbone's average is the lineage's."""
REBUILD = "or build all anew, with --rebuild: flows.dume, or the flow of the recipe's method"


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
    if record is None or not workspace.has_digest(artifact, recipe.pinned[artifact]):
        remedy = "is built upon and is not there as it was; bring it back (dvc pull --force in the "
        yield Fault("lineage.pinned", artifact, f"{remedy}workspace, or flows.restore), {REBUILD}")
        return
    made = record.get("params", {})
    if artifact == "backbone":
        for key in MERGE_KEYS:
            before, now = (_named(settings, key) for settings in (made, asked))
            if before != now:
                yield _made_otherwise(artifact, key, before, now)
    if not recipe.trains_seed:  # it was given, and copied; see given_faults
        return
    for name, value in json.loads(json.dumps(asked)).items():
        if name.partition(".")[0] not in DECIDE:
            continue
        try:
            recorded = recorded_setting(made, name)
        except KeyError:  # of another version of the code, and its default
            continue
        for key, before, now in _other(name, recorded, value):
            yield _made_otherwise(artifact, key, before, now)


def is_other_seed(recipe: Recipe, workspace: Workspace, fingerprints: Path) -> bool:
    """Whether the files of a given seed are others than those that the pinned seed was made of.

    Args:
        recipe: At work.
        workspace: Where the pinned seed is.
        fingerprints: ``sources/seed.json`` as it is about to be published; where the files lie is
            not in it.
    """
    made = workspace.inputs("seed").get("sources/seed.json")
    return "seed" in recipe.pinned and made not in (None, sha256_file(fingerprints))


def given_faults(recipe: Recipe, workspace: Workspace) -> Iterator[Fault]:
    """Hold the name of a given seed, whose files are others, against that of the pinned seed's.

    Under the same name a README may have changed, a hub's repository or an alias moved on, or an
    upgrade converts a GGUF file otherwise: what is built upon is there all the same.
    """
    named = (workspace.record("seed") or {}).get("params", {}).get("seed_model.model")
    if named not in (None, recipe.seed_model.model):
        remedy = f"is another seed than the one that is built upon, which was {named!r}; name that "
        remedy += f"one, {REBUILD}"
        yield Fault("seed_model.model", recipe.seed_model.model, remedy)


def _made_otherwise(artifact: str, key: str, before: Any, now: Any) -> Fault:
    remedy = f"{artifact} is built upon and was made with {before!r}; put that back, {REBUILD}"
    return Fault(key, now, remedy)


def _named(settings: Mapping[str, Any], key: str) -> Any:
    """How something is merged, by ``merge_keys``' names."""
    try:
        return recorded_setting(settings, key)
    except KeyError:
        return "average"


def _other(key: str, made: Any, asked: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two settings differ: key, and both values.

    What one of them does not know is of another version of the code, and its default.
    """
    if isinstance(made, dict) and isinstance(asked, dict):
        for name in sorted(made.keys() & asked.keys()):
            yield from _other(f"{key}.{name}", made[name], asked[name])
    elif made != asked:
        yield key, made, asked
