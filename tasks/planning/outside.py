"""What lies outside a workspace and is another than its stages have seen; no weight is read."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.durable import read_json
from infra.recipe.schema import Recipe
from tasks.data.task_sets import task_fingerprint
from tasks.data.texts import TEXTS
from tasks.engine.artifacts import FORMS, INSTRUCTIONS, SEED
from tasks.engine.workspace import Workspace, fingerprint
from tasks.planning.subjects import CONFIG
from upcycle_core.checkpoints.copy import belongs
from upcycle_core.checkpoints.known import KnownFiles
from upcycle_core.corpora.config import Source
from upcycle_core.corpora.harvest import MissingPackage
from upcycle_core.corpora.sources import source_fingerprint
from upcycle_core.corpora.tuning.prepare import instruction_fingerprint
from upcycle_core.errors import InputError

Seen = Mapping[str, Any]
"""What the stage ``sources`` has written of one name."""


def changed_outside(
    recipe: Recipe, workspace: Workspace, domains: Collection[str] | None = None
) -> Iterator[str]:
    """What will be another in files of the stage ``sources``, below the workspace.

    Of a text or a given model it is the part of the file (``sources/law.json/heldout``), of
    anything else the file. What a recipe newly names is left out: the stages that read it see that
    by their settings. A given model is another where its files do not look as when they were read.
    Those of a hub, of the registry and in a form of their own are taken to be as they were.

    Args:
        recipe: What is to be made.
        workspace: Its own.
        domains: Whose text is looked at; all by default.
    """
    # Whatever the recipe says of storage that lies about times: weights are not read here.
    known, folder = KnownFiles(workspace.known.path), recipe.text_folder
    for name in (*recipe.domains, SEED, *(f"outside/{name}" for name in recipe.outside)):
        file = f"sources/{name}.json"
        seen = read_json(workspace.path(file))
        if seen is None:
            continue
        looked = workspace.path(file).stat().st_mtime
        if domains is None or name in domains or name not in recipe.domains:
            for part, before, text in _texts(recipe, name, seen):
                if _is_other_text(before, text, folder, known):
                    yield f"{file}/{part}"
        for part, before, model in _models(recipe, name, seen):
            if _is_other_model(before, model, known, looked):
                yield f"{file}/{part}"
    yield from _other_sets(recipe, workspace)
    settings = (workspace.record("sources") or {}).get("params", {})
    if settings.get("experts.dtype", recipe.experts.dtype) != recipe.experts.dtype:
        yield f"sources/{FORMS}"


def _texts(recipe: Recipe, name: str, seen: Seen) -> Iterator[tuple[str, Seen, Source]]:
    """Each text of a name: which it is, what was seen of it, and the text."""
    domain = recipe.domains.get(name)
    parts = {part: getattr(domain, part) for part in TEXTS} if domain is not None else {}
    yield from ((part, seen[part], own) for part, own in parts.items() if own and part in seen)
    whole = recipe.seed_text if name == SEED else recipe.outside.get(name.rpartition("/")[2])
    if domain is None and whole is not None:
        yield "text", seen, whole


def _models(recipe: Recipe, name: str, seen: Seen) -> Iterator[tuple[str, Seen, str]]:
    """Each given model of a name: which it is, what was seen of it, and the model."""
    if (domain := recipe.domains.get(name)) is not None:
        origin = None if domain.origin is None else domain.origin.model
        parts = {"expert": domain.expert, "origin": origin}
    else:
        parts = {SEED: recipe.seed_model.model if name == SEED else None}
    yield from ((part, seen[part], own) for part, own in parts.items() if own and part in seen)


def _is_other_text(seen: Seen, source: Source, folder: Path | None, known: KnownFiles) -> bool:
    try:
        return source_fingerprint(source, folder=folder, known=known) != seen
    except (InputError, MissingPackage, OSError):  # said by who reads it
        return True


def _is_other_model(seen: Seen, reference: str, known: KnownFiles, looked: float) -> bool:
    """Whether files that may belong to a checkpoint do not look as they did; others are notes.

    Of a file whose hash is not remembered, as after a mount, the time of its last change says it:
    whether that was after it was ``looked`` at.
    """
    folder = Path(reference).expanduser()
    if not (folder / CONFIG).is_file():
        return False
    files = (file for file in folder.rglob("*") if file.is_file())
    there = {file.relative_to(folder).as_posix(): file for file in files}
    names = {name for name in seen.keys() | there.keys() if belongs(name)}
    if any(name not in there or name not in seen for name in names):
        return True
    recalled = {name: known.recalled(there[name], inode_may_change=True) for name in names}
    return any(
        _changed(there[name]) > looked if found is None else found != seen[name]
        for name, found in recalled.items()
    )


def _changed(file: Path) -> float:
    """When a file was last changed: copies may bring the time of their content along, not that of
    the inode, which links change too."""
    status = file.stat()
    return status.st_mtime if status.st_nlink > 1 else max(status.st_mtime, status.st_ctime)


def _other_sets(recipe: Recipe, workspace: Workspace) -> Iterator[str]:
    """Files of tasks and of instructions that will be others."""
    now: dict[str, Any] = {}
    try:
        for name in recipe.tasks:
            now[f"sources/tasks/{name}.json"] = task_fingerprint(recipe, name)
        if recipe.instructions.sources:
            read = instruction_fingerprint(recipe.instructions, folder=recipe.text_folder)
            now[f"sources/{INSTRUCTIONS}.json"] = read
    except (InputError, OSError):  # said by who reads them
        return
    for file, value in now.items():
        seen = read_json(workspace.path(file))
        if seen is not None and fingerprint(seen) != fingerprint(value):
            yield file
