"""The lineage of a workspace's model: what is built upon as it is while domains come, go and learn.

It lies in ``lineage.json`` beside the artifacts and becomes a part of the recipe of whatever runs
there, so that fingerprints, dvc.yaml and registered versions all know it.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from infra.durable import write_atomically
from infra.recipe.schema import Lineage, Recipe
from tasks.engine.workspace import Workspace
from tasks.methods import METHODS
from upcycle_core.errors import Fault, InputError, raise_faults

FILE = "lineage.json"
EXPERTS = ("experts/", "repaired/")
"""Where experts lie, and what they were repaired into."""
PINNED = ("tokenizer", "seed_text", "seed", "backbone")
"""Artifacts that statistics and experts of all domains hang on."""


def with_lineage(recipe: Recipe, workspace: Workspace) -> Recipe:
    """The recipe as the workspace's model goes on; as it is where that has no lineage.

    What was said of domains that the recipe has no more is left out.
    """
    path = workspace.root / FILE
    if not (METHODS[recipe.method].lives and path.exists()):
        return recipe
    lineage = _load(path)
    parents = {name: found for name, found in lineage.parents.items() if name in recipe.domains}
    return replace(recipe, lineage=replace(lineage, parents=parents))


def begin(recipe: Recipe, workspace: Workspace, *, new: Collection[str] = ()) -> Recipe:
    """The recipe with a lineage that pins what has been built, where it is not pinned yet.

    Args:
        recipe: At work.
        workspace: Where its model was built.
        new: Domains that come; their experts are trained from the seed.

    Raises:
        InputError: Nothing has been built there, or a build of everything did not end.
    """
    recipe = with_lineage(recipe, workspace)
    lineage = recipe.lineage or Lineage()
    there = {"seed_text": recipe.seed_text is not None, "seed": recipe.has_seed}
    wanted = [name for name in PINNED if there.get(name, True)]
    found = {name: workspace.digest(name) for name in wanted if name not in lineage.pinned}
    raise_faults(
        Fault("workspace", str(workspace.path(name)), "has not been built; run flows.dume first")
        for name, digest in found.items()
        if digest is None or workspace.provenance(name) is None
    )
    raise_faults(_mixed_faults(recipe, workspace) if recipe.lineage is None else ())
    pinned = {name: digest for name, digest in found.items() if digest is not None}
    backbone = lineage.backbone
    if "backbone" in pinned:
        backbone = _experts_in(_inputs(workspace, "backbone"))
    pinned = {**lineage.pinned, **pinned}
    parents = {name: found for name, found in lineage.parents.items() if name not in new}
    lineage = replace(lineage, pinned=pinned, backbone=backbone, parents=parents)
    return replace(recipe, lineage=lineage)


def with_parents(
    recipe: Recipe, workspace: Workspace, *, led: Mapping[str, Collection[str]]
) -> Recipe:
    """The recipe with a parent for each expert whose training text has changed since.

    An expert that was in a champion is continued from as it is; another, which was refused, is
    replaced by one continued from what that was continued from. One that was trained from the seed
    on the text that is there now (new text that failed, and was taken back) has no parent.

    Args:
        recipe: With a lineage.
        workspace: Its corpora are new, its experts are not yet.
        led: {domain: digests, or their beginnings, of its experts that have been in a champion}.

    Raises:
        InputError: Neither the expert nor what it was continued from is of a champion, though an
            expert that is not there is.
    """
    assert recipe.lineage is not None
    parents = dict(recipe.parents)
    for name, domain in recipe.domains.items():
        text, made_from = f"corpora/{name}/train", _inputs(workspace, f"experts/{name}")
        digest = workspace.digest(f"experts/{name}")
        if domain.expert is not None or digest is None or text not in made_from:
            continue
        if not workspace.has_digest(text, made_from[text]):
            before, led_here = parents.get(name), led.get(name, ())
            names = workspace.digests(f"experts/{name}")
            has_led = any(n.startswith(tuple(led_here)) for n in names) if led_here else False
            parents[name] = _parent(
                recipe, name, digest, before=before, led=led_here, has_led=has_led
            )
        elif "seed" in made_from:
            parents.pop(name, None)
    return replace(recipe, lineage=replace(recipe.lineage, parents=parents))


def _parent(
    recipe: Recipe,
    domain: str,
    digest: str,
    *,
    before: str | None,
    led: Collection[str],
    has_led: bool,
) -> str:
    """What the expert that is there, or what that was continued from, is continued from next."""
    if has_led:
        return digest
    if before is not None and before.startswith(tuple(led)):
        return before
    if led and before is not None:
        remedy = "was refused or rolled back, and the champion's expert is not in the workspace; "
        remedy += "move the workspace away and bring that of the champion (flows.restore "
        remedy += f"{recipe.registered_name} champion), or build all anew: flows.dume --rebuild"
        raise InputError(Fault(f"experts/{domain}", digest, remedy))
    return digest if before is None else before


def without_backbone(recipe: Recipe) -> Recipe:
    """The recipe whose backbone averages all of its domains again."""
    assert recipe.lineage is not None
    pinned = {name: found for name, found in recipe.pinned.items() if name != "backbone"}
    lineage = replace(recipe.lineage, pinned=pinned, backbone=())
    return replace(recipe, lineage=lineage, backbone=replace(recipe.backbone, experts=None))


def modelled(workspace: Workspace) -> tuple[str, ...]:
    """Domains of the workspace's model, in its order; none before there is a whole one."""
    return _experts_in(_inputs(workspace, "model"))


def _experts_in(inputs: Collection[str]) -> tuple[str, ...]:
    """Domains whose experts, repaired or as they are, something was made from."""
    named = (name.partition("/")[2] for name in inputs if name.startswith(EXPERTS))
    return tuple(dict.fromkeys(named))


def save(lineage: Lineage, workspace: Workspace) -> None:
    """Write it beside the artifacts; it is on the disk when this returns."""
    text = json.dumps(asdict(lineage), indent=1, sort_keys=True) + "\n"
    write_atomically(workspace.root / FILE, text)


def forget(workspace: Workspace) -> None:
    """Build everything anew the next time."""
    (workspace.root / FILE).unlink(missing_ok=True)


def _load(path: Path) -> Lineage:
    try:
        values = json.loads(path.read_text())
        return Lineage(
            pinned=values["pinned"], backbone=tuple(values["backbone"]), parents=values["parents"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f"cannot be read ({error}); bring it back, or delete it and build all anew"
        raise InputError(Fault("lineage", str(path), remedy)) from error


def _inputs(workspace: Workspace, artifact: str) -> dict[str, str]:
    """{input: sha256} that a published artifact was made from; none if that cannot be read."""
    return (workspace.record(artifact) or {}).get("inputs", {})


def _mixed_faults(recipe: Recipe, workspace: Workspace) -> Iterator[Fault]:
    """What was not made from what lies beside it now: a build of everything did not end."""
    of_each = [f"{kind}{domain}" for kind in EXPERTS for domain in modelled(workspace)]
    remedy = "was made from another {}: a build did not end; end it first: flows.dume"
    for artifact in (
        "model",
        "backbone",
        "routed",
        *of_each,
        *(["seed"] if recipe.has_seed else []),
    ):
        for name, digest in _inputs(workspace, artifact).items():
            is_built_upon = name in PINNED or name.startswith(EXPERTS)
            if is_built_upon and not workspace.has_digest(name, digest):
                yield Fault("workspace", str(workspace.path(artifact)), remedy.format(name))
