"""Bring a registered version back: data, experts and statistics from the DVC remote, its model.

``python -m flows.restore NAME VERSION [--into FOLDER] [--remote REMOTE]``

VERSION is a number or an alias (``champion``). The version carries the recipe and the dvc.lock that
made it; DVC holds every file against its hash. FOLDER becomes a home (``UPCYCLE_HOME=FOLDER``) with
the recipe's workspace in it, which must not be there yet. A model that is put together from
these comes from the version's own files, or else is put together again.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from flows.running.arguments import parser_of
from flows.running.command_line import command, reach_server
from flows.running.naming import completed, name_run, title_of_day
from flows.running.refused import in_a_line
from flows.running.session import pieces_run, prepare
from flows.running.turn import live, log
from infra.durable import write_atomically
from infra.recipe.names import masked, remote_fault, secret_faults
from infra.recipe.schema import Recipe
from infra.settings import Settings, configure
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from infra.versioning.versions import Versions, remote_faults, remote_of
from tasks.engine.stage import Session
from tasks.engine.workspace import RESTORING, Workspace
from tasks.living.lineage import save
from tasks.methods import stages_of
from tasks.recipes import validate
from tasks.release.recovered import recover
from tasks.release.versions import COMPRESSED_TAG, MODEL_TAG
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.report.numbers import slug

COMMIT_TAG = "git.commit"
BESIDE = {".lock", ".waiting"}
"""What flows leave in a workspace that they have made nothing in."""


@flow(name="restore")
@in_a_line
def restore(
    name: str, version: str = "champion", into: str | None = None, remote: str | None = None
) -> State:
    """Bring everything that made a registered version back into an empty folder.

    Args:
        name: The registered model.
        version: Its number, or an alias.
        into: The home to restore into; the one at work by default. A relative path is seen from
            where the flow runs, which of a deployed one is the checkout.
        remote: The DVC remote; the recipe's by default. A relative path is seen from the home at
            work, as in a recipe.

    Returns:
        The workspace.
    """
    settings = configure()
    found, recipe, workspace, source = look(settings, name, version, into, remote)
    title = title_of_day(f"restore of {name}")
    with workspace.lock("the flow restore", restores=True), all_or_nothing(workspace):
        live(workspace.root.parent, workspace.root.name)
        name_run(title, tags=(recipe.name,))
        versions = Versions(workspace.root)
        prepare(versions, recipe)
        if recipe.lineage is not None:
            save(recipe.lineage, workspace)
        log(f"fetching {found.reference} from {masked(source)}")
        # The limit is that of nights: what a restore has brought by then would be lost.
        unlimited = replace(recipe, compute=replace(recipe.compute, limit_hours=None))
        session = Session(unlimited, workspace, log=log)
        _bring(session, versions, settings, found, source)
        artifacts = _check(recipe, workspace, found)
    said = f"`{found.reference}` is restored in {workspace.root}: {artifacts} artifacts, all as "
    said += "they were published."
    create_markdown_artifact(key=slug(f"{name}-restore"), markdown=said)
    outcome = f"version {found.number}, {artifacts} artifacts as they were published"
    return completed(title, outcome, str(workspace.root))


@contextmanager
def all_or_nothing(workspace: Workspace) -> Iterator[None]:
    """An empty workspace, and again none if what follows fails; a kill leaves a mark in it."""
    raise_faults(_there_faults(workspace))  # somebody may have come before us
    for path in _brought(workspace):
        remove(path)
    mark = workspace.root / RESTORING
    write_atomically(mark, "")
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the error that brought us here is the one to see
            for path in _brought(workspace):
                with suppress(OSError):
                    remove(path)
            if not _brought(workspace):
                mark.unlink()
                shutil.rmtree(workspace.root / ".waiting", ignore_errors=True)
                (workspace.root / ".lock").unlink()  # from here on another flow may begin
                workspace.root.rmdir()
        raise
    mark.unlink()


def _brought(workspace: Workspace) -> list[Path]:
    """What a restore has brought; beside it lies what says that one is at work."""
    return [path for path in workspace.root.iterdir() if path.name not in BESIDE | {RESTORING}]


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _bring(
    session: Session, versions: Versions, settings: Settings, version: Version, remote: str
) -> None:
    """All that the version's dvc.lock names, to its place.

    Raises:
        InputError: Something is not there, or not as it was.
    """
    registry, recipe = Registry(settings), session.recipe
    lock, stages = registry.text(version, "dvc.lock") or "", stages_of(recipe)
    outs = {s.label(item): s.artifact(item) for s in stages for item in s.items(recipe)}
    parted = {s.label(""): s for s in stages if s.in_parts and s.items(recipe)}
    versions.pull(lock, remote, outs, only=outs.keys() - parted.keys())
    for label, stage in parted.items():
        recover(
            stage,
            session,
            registry=registry,
            version=version,
            pull=partial(versions.pull, lock, remote, outs, only=[label]),
            compute=partial(pieces_run, settings, recipe, session.workspace),
        )


def look(
    settings: Settings, name: str, version: str, into: str | None, remote: str | None
) -> tuple[Version, Recipe, Workspace, str]:
    """What is restored, by which recipe, where, and from where: a URL, or a full path.

    Raises:
        InputError: There is no such version, or no place or no remote for it.
    """
    registry = Registry(settings)
    found = _version(registry, name, version)
    recipe = _recipe(registry, found)
    home = Path(into).expanduser().absolute() if into else settings.home
    workspace = Workspace(home / recipe.name)
    source = remote or recipe.versions.remote
    raise_faults(_faults(workspace, source, settings.home))
    assert source is not None
    return found, recipe, workspace, remote_of(source, settings.home)


def _version(registry: Registry, name: str, version: str) -> Version:
    versions = registry.versions(name)
    found = [v for v in versions if version == str(v.number) or version in v.aliases]
    if not versions:
        remedy = "is no registered model; see the names in MLflow (make up)"
        raise InputError(Fault("name", name, remedy))
    if not found:
        known = ", ".join(str(v.number) for v in versions)
        raise InputError(
            Fault("version", f"{name} {version}", f"is not registered; it has {known}")
        )
    return found[-1]


def _recipe(registry: Registry, version: Version) -> Recipe:
    """The recipe that the version carries."""
    text = registry.text(version, "recipe.yaml")
    commit = version.tags.get(COMMIT_TAG, "unknown")
    if text is None or not registry.text(version, "dvc.lock"):
        remedy = (
            "has no recipe.yaml and dvc.lock beside it: its files are gone, or no flow of this "
        )
        remedy += "project made it; name another version"
        raise InputError(Fault("version", version.reference, remedy))
    try:
        return validate(_with_one_gpu(yaml.safe_load(text)))
    except InputError as error:
        remedy = f"holds a recipe of other code; check out Git commit {commit} and restore again"
        raise InputError(Fault("version", version.reference, remedy), *error.faults) from None


def _with_one_gpu(values: Any) -> Any:
    """Values of a recipe that may be older than the rule that a piece computes on one GPU.

    What is scored on tasks may be divided among several: that section is younger than the rule.
    """
    compute = values.get("compute") if isinstance(values, dict) else None
    for kind, asked in compute.items() if isinstance(compute, dict) else ():
        if isinstance(asked, dict) and asked.get("gpus", 0) > 1 and kind != "task_evaluation":
            asked["gpus"] = 1
    return values


def _faults(workspace: Workspace, remote: str | None, seen_from: Path) -> list[Fault]:
    found = [*_there_faults(workspace)]
    if remote is None:
        remedy = "the recipe names none; give the one that it was pushed to with --remote"
        found.append(Fault("remote", None, remedy))
    else:
        found += [*remote_fault("remote", remote), *secret_faults(remote, "remote")]
        found += remote_faults("remote", remote, seen_from)
    return found


def _there_faults(workspace: Workspace) -> Iterator[Fault]:
    """A workspace that holds more than what a refused flow, or a killed restore, leaves."""
    root = workspace.root
    there = {path.name for path in root.iterdir()} if root.exists() else set()
    if there - BESIDE and RESTORING not in there:
        remedy = "is there already; name another folder with --into, or move it away"
        yield Fault("into", str(root), remedy)


def _check(recipe: Recipe, workspace: Workspace, version: Version) -> int:
    """Hold every artifact against what it was when it was published; how many there are.

    Raises:
        InputError: With every artifact that is absent or not as it was.
    """
    workspace.known.verify = "always"
    needed = [
        stage.artifact(item)
        for stage in stages_of(recipe)
        for item in stage.items(recipe)
        if workspace.path(stage.artifact(item)).exists()
    ]
    remedy = "is not as it was published; the remote is damaged, or is another one"
    faults = [Fault("remote", name, remedy) for name in needed if not workspace.provenance(name)]
    model = "compression/model" if COMPRESSED_TAG in version.tags else "model"
    tag = version.tags.get(MODEL_TAG)
    if tag is not None and not workspace.has_digest(model, tag):
        commit = version.tags.get(COMMIT_TAG, "unknown")
        remedy = f"is not the model of {version.reference}: the remote is damaged, or other code "
        remedy += f"has put it together; check out Git commit {commit} and restore again"
        faults.append(Fault("remote", "model", remedy))
    raise_faults(faults)
    return len(needed)


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    chosen = parser_of("restore").parse_args(arguments)
    # A person names a folder from where they are; a recipe, from the home.
    remote = remote_of(chosen.remote, Path.cwd()) if chosen.remote else None
    asked = (chosen.name, chosen.version, chosen.into, remote)
    settings = configure()
    look(settings, *asked)  # said before Prefect records a run that cannot begin
    reach_server(settings)
    print(restore(*asked))


if __name__ == "__main__":
    sys.exit(main())
