"""The lineage of a workspace's model: what is built upon as it is while domains come, go and learn.

It lies in ``lineage.json`` beside the artifacts and becomes a part of the recipe of whatever runs
there, so that fingerprints, dvc.yaml and registered versions all know it.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from infra.durable import SEAL, is_whole, sealed, write_atomically
from infra.recipe.schema import Lineage, Recipe
from tasks.engine.life import EXPERTS, Life, experts_in, joined, modelled
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace, enclosing
from tasks.methods import METHODS, stages_of
from upcycle_core.errors import Fault, InputError, raise_faults

FILE = "lineage.json"


def life_of(recipe: Recipe) -> Life:
    """How models of the recipe's method live on.

    Raises:
        InputError: They do not.
    """
    method = METHODS[recipe.method]
    if method.life is None:
        remedy = f"its models do not grow, shrink or learn; change the recipe and run {method.flow}"
        raise InputError(Fault("method", recipe.method, remedy))
    return method.life()


def with_lineage(recipe: Recipe, workspace: Workspace) -> Recipe:
    """The recipe as the workspace's model goes on; as it is where that has no lineage.

    What was said of domains that the recipe has no more is left out.
    """
    path = workspace.root / FILE
    of_method = METHODS[recipe.method].life
    if of_method is None or not path.exists():
        return recipe
    life = of_method()
    lineage = _load(path)
    parents = {name: found for name, found in lineage.parents.items() if name in recipe.domains}
    return life.settled(replace(recipe, lineage=replace(lineage, parents=parents)), workspace)


def begin(recipe: Recipe, workspace: Workspace, *, new: Collection[str] = ()) -> Recipe:
    """The recipe with a lineage that pins what has been built, where it is not pinned yet.

    A backbone that the workspace's model was not made with, as a rebuild that was stopped leaves
    it, is not built upon.

    Args:
        recipe: At work.
        workspace: Where its model was built.
        new: Domains that come; their experts are trained from the seed.

    Raises:
        InputError: Nothing has been built there, or a build of everything did not end.
    """
    life = life_of(recipe)
    recipe = with_lineage(recipe, workspace)
    wanted = list(life.pinned(recipe))
    if recipe.lineage is not None and "backbone" not in recipe.pinned and _is_other(workspace):
        recipe = without_backbone(recipe)
        wanted.remove("backbone")
    lineage = recipe.lineage or Lineage()
    found = {name: workspace.digest(name) for name in wanted if name not in lineage.pinned}
    remedy = f"has not been built; run {METHODS[recipe.method].flow} first"
    raise_faults(
        Fault("workspace", str(workspace.path(name)), remedy)
        for name, digest in found.items()
        if digest is None or workspace.provenance(name) is None
    )
    raise_faults(_mixed_faults(recipe, workspace) if recipe.lineage is None else ())
    pinned = {name: digest for name, digest in found.items() if digest is not None}
    backbone = lineage.backbone
    if "backbone" in pinned:
        backbone = experts_in(workspace.inputs("backbone"))
    pinned = {**lineage.pinned, **pinned}
    parents = {name: found for name, found in lineage.parents.items() if name not in new}
    anchor = life.anchor(recipe, modelled(workspace))
    lineage = Lineage(pinned=pinned, backbone=backbone, parents=parents, anchor=anchor)
    return life.settled(replace(recipe, lineage=lineage), workspace)


def settle(recipe: Recipe, workspace: Workspace) -> Recipe:
    """The recipe with the backbone pinned that its model was made with, after it was made anew."""
    if recipe.lineage is None or "backbone" in recipe.pinned or not life_of(recipe).averages:
        return recipe
    return begin(recipe, workspace)


def averaged_in(workspace: Workspace) -> tuple[str, ...]:
    """Domains in the backbone of the workspace's model; none where another one has its place."""
    return () if _is_other(workspace) else experts_in(workspace.inputs("backbone"))


def _is_other(workspace: Workspace) -> bool:
    """Whether another backbone has the place of the model's."""
    used = workspace.inputs("model").get("backbone")
    return used is not None and not workspace.has_digest("backbone", used)


def with_parents(
    recipe: Recipe, workspace: Workspace, *, led: Mapping[str, Collection[str]] | None
) -> Recipe:
    """The recipe with a parent for each expert whose training text has changed since.

    An expert that was in a champion is continued from as it is; another, which was refused, is
    replaced by one continued from what that was continued from. One that was trained from the seed
    on the text that is there now (new text that failed, and was taken back) has no parent.
    Whatever else an expert was made from, only text that it was trained on is asked for.

    Args:
        recipe: With a lineage.
        workspace: Its corpora are new, its experts are not yet.
        led: {domain: digests, or their beginnings, of its experts that have been in a champion}.
            None where the registry knows no version, as in a home that was restored: the experts
            that are there are continued.

    Raises:
        InputError: Neither the expert nor what it was continued from is of a champion, though an
            expert that is not there is.
    """
    assert recipe.lineage is not None
    parents, life = dict(recipe.parents), life_of(recipe)
    known = life.modelled(workspace) or recipe.domains  # of a model that was lost, none is told
    for name, domain in recipe.domains.items():
        made_from, digest = workspace.inputs(f"experts/{name}"), workspace.digest(f"experts/{name}")
        texts = list(filter(None, (_read(text, made_from) for text in life.texts(recipe, name))))
        if name not in known:  # left by a growing that did not end: it begins at the seed again
            parents.pop(name, None)
            continue
        if name not in parents and (parent := _recorded_parent(workspace, name, made_from)):
            parents[name] = parent
        if domain.expert is not None or digest is None or not texts:
            continue
        if not all(workspace.has_digest(text, made_from[text]) for text in texts):
            before, led_here = parents.get(name), (led or {}).get(name, ())
            names = workspace.digests(f"experts/{name}")
            has_led = led is None or any(n.startswith(tuple(led_here)) for n in names)
            parents[name] = _parent(
                recipe, name, digest, before=before, led=led_here, has_led=has_led
            )
        elif f"parents/{name}" not in made_from:
            parents.pop(name, None)
    return replace(recipe, lineage=replace(recipe.lineage, parents=parents))


def _read(text: str, made_from: Mapping[str, str]) -> str | None:
    """What an expert is recorded to have read of ``text``: an earlier version named all around."""
    return next((within for within in enclosing(text) if within in made_from), None)


def _recorded_parent(workspace: Workspace, domain: str, made_from: Mapping[str, str]) -> str | None:
    """What an expert was continued from, where a shrinking that did not end has forgotten it."""
    artifact = f"parents/{domain}"
    if artifact not in made_from or not workspace.has_digest(artifact, made_from[artifact]):
        return None
    return (workspace.record(artifact) or {}).get("params", {}).get(f"lineage.parents.{domain}")


def check_built_upon(session: Session) -> None:
    """See that what is pinned is there and is what the recipe asks for, before more is trained.

    What the recipe no longer makes, a seed's text say, is not asked for.

    Raises:
        InputError: With all that is not.
    """
    faults: list[Fault] = []
    for stage in stages_of(session.recipe):
        if stage.name in session.recipe.pinned and stage.items(session.recipe):
            try:
                stage.is_current(session)
            except InputError as error:
                faults += error.faults
    raise_faults(faults)


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
        remedy += f"{recipe.registered_name} champion), or build all anew: "
        remedy += f"{METHODS[recipe.method].flow} --rebuild"
        raise InputError(Fault(f"experts/{domain}", digest, remedy))
    return digest if before is None else before


def without_backbone(recipe: Recipe) -> Recipe:
    """The recipe whose backbone averages all of its domains again."""
    assert recipe.lineage is not None
    pinned = {name: found for name, found in recipe.pinned.items() if name != "backbone"}
    lineage = replace(recipe.lineage, pinned=pinned, backbone=())
    return replace(recipe, lineage=lineage, backbone=replace(recipe.backbone, experts=None))


def save(lineage: Lineage, workspace: Workspace) -> None:
    """Write it beside the artifacts; it is on the disk when this returns."""
    text = json.dumps(sealed(asdict(lineage)), indent=1, sort_keys=True) + "\n"
    write_atomically(workspace.root / FILE, text)


def forget(workspace: Workspace) -> None:
    """Build everything anew the next time."""
    (workspace.root / FILE).unlink(missing_ok=True)


def _load(path: Path) -> Lineage:
    try:
        values = json.loads(path.read_text())
        if SEAL in values and not is_whole(values):
            raise ValueError("it is not as it was written")
        return Lineage(
            pinned=values["pinned"],
            backbone=tuple(values["backbone"]),
            parents=values["parents"],
            anchor=values.get("anchor"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f"cannot be read ({error}); bring it back, or delete it and build all anew"
        raise InputError(Fault("lineage", str(path), remedy)) from error


def _mixed_faults(recipe: Recipe, workspace: Workspace) -> Iterator[Fault]:
    """What was not made from what lies beside it now: a build of everything did not end."""
    of_each = [f"{kind}{domain}" for kind in EXPERTS for domain in modelled(workspace)]
    start, pinned = joined(workspace), life_of(recipe).pinned(recipe)
    remedy = "was made from another {}: a build did not end; end it first: "
    remedy += METHODS[recipe.method].flow
    for artifact in dict.fromkeys(("model", "routed", start, *pinned, *of_each)):
        for name, digest in workspace.inputs(artifact).items():
            is_built_upon = name in (*pinned, start) or name.startswith(EXPERTS)
            if is_built_upon and not workspace.has_digest(name, digest):
                yield Fault("workspace", str(workspace.path(artifact)), remedy.format(name))
