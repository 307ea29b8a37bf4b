"""The lineage of a workspace's model: what is built upon as it is while domains come, go and learn.

It lies in ``lineage.json`` beside the artifacts and becomes a part of the recipe of whatever runs
there, so that fingerprints, dvc.yaml and registered versions all know it.
"""

import json
from collections.abc import Container
from dataclasses import asdict, replace
from pathlib import Path

from infra.lineage import Lineage
from infra.recipe import Recipe
from tasks.workspace import Workspace
from upcycle_core.checkpoints.writer import sync_directory, sync_file
from upcycle_core.errors import Fault, InputError, raise_faults

FILE = "lineage.json"
PINNED = ("tokenizer", "seed", "backbone")
"""Artifacts that statistics and experts of all domains hang on."""


def with_lineage(recipe: Recipe, workspace: Workspace) -> Recipe:
    """The recipe as the workspace's model goes on; as it is where that has no lineage."""
    path = workspace.root / FILE
    if recipe.method != "dume" or not path.exists():
        return recipe
    return replace(recipe, lineage=_load(path))


def begin(recipe: Recipe, workspace: Workspace) -> Recipe:
    """The recipe with a lineage that pins what has been built, where it is not pinned yet.

    Raises:
        InputError: Nothing has been built there.
    """
    recipe = with_lineage(recipe, workspace)
    lineage = recipe.lineage or Lineage()
    wanted = [name for name in PINNED if name != "seed" or recipe.has_seed]
    found = {name: workspace.digest(name) for name in wanted if name not in lineage.pinned}
    raise_faults(
        Fault("workspace", str(workspace.path(name)), "has not been built; run flows.dume first")
        for name, digest in found.items()
        if digest is None or workspace.provenance(name) is None
    )
    pinned = {name: digest for name, digest in found.items() if digest is not None}
    backbone = lineage.backbone
    if "backbone" in pinned:
        backbone = tuple(name.partition("/")[2] for name in _inputs(workspace, "backbone"))
    pinned = {**lineage.pinned, **pinned}
    return replace(recipe, lineage=replace(lineage, pinned=pinned, backbone=backbone))


def with_parents(recipe: Recipe, workspace: Workspace, *, led: Container[str]) -> Recipe:
    """The recipe with a parent for each expert whose training text has changed since.

    Args:
        recipe: With a lineage.
        workspace: Its corpora are new, its experts are not yet.
        led: Domains whose expert has been in a champion. It is continued from as it is; another,
            which was refused, is replaced by one continued from what that was continued from.
    """
    assert recipe.lineage is not None
    parents = {name: found for name, found in recipe.parents.items() if name in recipe.domains}
    for name, domain in recipe.domains.items():
        text, made_from = f"corpora/{name}/train", _inputs(workspace, f"experts/{name}")
        digest = workspace.digest(f"experts/{name}")
        has_new_text = text in made_from and made_from[text] != workspace.digest(text)
        if domain.expert is None and digest is not None and has_new_text:
            parents[name] = digest if name in led else parents.get(name, digest)
    return replace(recipe, lineage=replace(recipe.lineage, parents=parents))


def without_backbone(recipe: Recipe) -> Recipe:
    """The recipe whose backbone averages all of its domains again."""
    assert recipe.lineage is not None
    pinned = {name: found for name, found in recipe.pinned.items() if name != "backbone"}
    lineage = replace(recipe.lineage, pinned=pinned, backbone=())
    return replace(recipe, lineage=lineage, backbone=replace(recipe.backbone, experts=None))


def modelled(workspace: Workspace) -> tuple[str, ...]:
    """Domains of the workspace's model, in its order; none before there is one."""
    found = _inputs(workspace, "model")
    return tuple(name.partition("/")[2] for name in found if name.startswith("experts/"))


def save(lineage: Lineage, workspace: Workspace) -> None:
    """Write it beside the artifacts; it is on the disk when this returns."""
    path = workspace.root / FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(lineage), indent=1, sort_keys=True) + "\n")
    sync_file(partial)
    partial.replace(path)
    sync_directory(workspace.root)


def forget(workspace: Workspace) -> None:
    """Build everything anew the next time."""
    (workspace.root / FILE).unlink(missing_ok=True)


def _load(path: Path) -> Lineage:
    try:
        values = json.loads(path.read_text())
        return Lineage(
            pinned=values["pinned"], backbone=tuple(values["backbone"]), parents=values["parents"]
        )
    except (ValueError, KeyError, TypeError) as error:
        remedy = f"cannot be read ({error}); bring it back, or delete it and build all anew"
        raise InputError(Fault("lineage", str(path), remedy)) from error


def _inputs(workspace: Workspace, artifact: str) -> dict[str, str]:
    """{input: sha256} that a published artifact was made from."""
    record = workspace.path(artifact) / "provenance.json"
    try:
        return json.loads(record.read_text())["inputs"]
    except (FileNotFoundError, NotADirectoryError):
        return {}
