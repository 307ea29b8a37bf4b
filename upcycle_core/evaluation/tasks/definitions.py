"""Tasks made whole on disk: a definition for the harness, and its data beside it.

A directory holds ``task.json`` (what the recipe says), ``data/`` (local data, copied) and, where
the recipe names one, ``definition/``: a definition with what it includes and the modules that it
calls. Nothing in it points elsewhere, so its digest says what a score was measured on.

In a recipe ``{folder}`` stands for ``folder``; relative paths of definitions begin at ``root``.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.tasks.config import EvaluationTask
from upcycle_core.evaluation.tasks.heldout import heldout_definition, heldout_items
from upcycle_core.evaluation.tasks.superni import superni_definition, superni_items

SETTINGS, DEFINITION, DATA = "task.json", "definition", "data"
LOCAL = ("json", "parquet", "csv", "text")
"""Builders of ``datasets`` that read local files."""
FOLDER = "{folder}"
SPLIT = re.compile(r"[A-Za-z0-9_-]+")
_NAME_FILES = (
    f"name every file: dataset_path one of {', '.join(LOCAL)}, and in dataset_kwargs "
    "data_files: {test: PATH}"
)


def task_faults(
    task: EvaluationTask, where: str, *, folder: Path | None, root: Path
) -> list[Fault]:
    """What keeps a task from being made, as far as this machine's files tell.

    Args:
        task: The task.
        where: Where the recipe names it (``tasks.gsm8k``).
    """
    try:
        found = [
            fault
            for field, paths in _references(task, root).items()
            for path in paths
            for fault in _file_faults(path, f"{where}.{field}", folder)
        ]
        if task.superni is not None and not found:
            _superni_items(task, folder)
    except InputError as error:
        return _within(where, error)
    return list(dict.fromkeys(found))  # several files may want the same folder


def runs_programs(task: EvaluationTask, root: Path) -> bool:
    """Whether what the model writes is run."""
    return task.definition is not None and "program" in read_definition(root / task.definition)


def task_files(task: EvaluationTask, *, folder: Path | None, root: Path) -> dict[str, Path]:
    """{as the recipe or the definition writes it: path} of every file that a task is made from."""
    files = {
        reference: _filled(reference, folder)
        for references in _references(task, root).values()
        for reference in references
    }
    return files | (_sources(root / task.definition) if task.definition is not None else {})


def write_task(
    task: EvaluationTask,
    out: Path,
    *,
    folder: Path | None,
    root: Path,
    seed: int,
    texts: Callable[[], Iterable[str]],
) -> None:
    """Write everything about a task into the new directory ``out``.

    Args:
        task: A task without faults.
        out: Directory to make, named as the task.
        seed: Draws the items of held-out text.
        texts: Gives the held-out documents of the task's domain.

    Raises:
        InputError: The text is too short for the items, or a data file is not what it should be.
    """
    (out / DATA).mkdir(parents=True)
    config: dict[str, Any] = {}
    definition = None
    try:
        if task.heldout is not None:
            rows = heldout_items(texts(), kind=task.heldout, count=task.items, seed=seed)
            config = heldout_definition(task.heldout, rows) | _rows(rows, out)
        elif task.superni is not None:
            config = superni_definition() | _rows(_superni_items(task, folder), out)
        elif task.definition is not None:
            definition = _copy_sources(root / task.definition, out)
            config = _copy_data(read_definition(root / task.definition), out, folder)
    except InputError as error:
        raise InputError(*_within(f"tasks.{out.name}", error)) from None
    given = ("shots", "metric", "limit", "stop", "max_new_tokens")
    settings = {
        "harness": task.harness,
        "definition": definition,
        "config": config,
        **{name: getattr(task, name) for name in given},
    }
    (out / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")


def _within(where: str, error: InputError) -> list[Fault]:
    """Faults with the recipe's field, which what found them did not know."""
    return [Fault(f"{where}.{fault.field}", fault.value, fault.remedy) for fault in error.faults]


def read_definition(path: Path, field: str = "definition") -> dict[str, Any]:
    """The keys of a task definition, those that it includes with it; functions as their names.

    Raises:
        InputError: There is no such file, or it is not a definition.
    """
    merged: dict[str, Any] = {}
    for found in _definitions(path, field).values():
        merged |= found
    return {key: value for key, value in merged.items() if key != "include"}


def _definitions(path: Path, field: str, above: tuple[Path, ...] = ()) -> dict[Path, Any]:
    """{file: its keys} of a definition after all that it includes, as the harness merges them."""
    path = path.resolve()
    if path in above:
        raise InputError(Fault(field, str(path), "includes itself; take one `include` out"))
    found = _load(path, field)
    included = found.get("include", [])
    before: dict[Path, Any] = {}
    for name in [included] if isinstance(included, str) else included:
        if Path(name).is_absolute():
            remedy = f"is included by its place on this machine; write it relative to {path}"
            raise InputError(Fault(field, name, remedy))
        before |= _definitions(path.parent / name, field, (*above, path))
    return before | {path: found}


def _load(path: Path, field: str) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Keeps ``!function module.name`` as text."""

    def name(loader: Loader, node: Any) -> object:
        return loader.construct_scalar(node)

    Loader.add_constructor("!function", name)
    try:
        found = yaml.load(path.read_text(), Loader=Loader)
    except FileNotFoundError:
        raise InputError(Fault(field, str(path), "no such file; name a task's YAML")) from None
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"cannot be read ({error}); name a task's YAML"
        raise InputError(Fault(field, str(path), remedy)) from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InputError(Fault(field, str(path), f"not YAML ({reason}); correct it")) from None
    if not isinstance(found, dict) or "group" in found:
        raise InputError(Fault(field, str(path), "no task definition; see recipes/tasks"))
    return found


def _superni_items(task: EvaluationTask, folder: Path | None) -> list[dict[str, Any]]:
    assert task.superni is not None
    source = task.superni
    try:
        return superni_items(
            _filled(source.instances, folder),
            _filled(source.tasks, folder),
            categories=source.categories,
            split=source.split,
            per_task=source.per_task,
        )
    except InputError as error:
        own = {"split": "superni.split", "categories": "superni.categories", "superni": "superni"}
        raise InputError(
            *(
                Fault(own.get(f.field, f"superni: {f.field}"), f.value, f.remedy)
                for f in error.faults
            )
        ) from None


def _references(task: EvaluationTask, root: Path) -> dict[str, list[str]]:
    """{field: files as they are written} of the data that a task reads from outside."""
    if task.superni is not None:
        source = task.superni
        return {"superni.instances": [source.instances], "superni.tasks": [source.tasks]}
    if task.definition is None:
        return {}
    files = _data_files(read_definition(root / task.definition))
    return {"definition": [reference for paths in files.values() for reference in paths]}


def _file_faults(reference: str, field: str, folder: Path | None) -> list[Fault]:
    if FOLDER in reference and folder is None:
        remedy = f"{field} needs it; add --set task_evaluation.folder=PATH"
        return [Fault("task_evaluation.folder", None, remedy)]
    path = _filled(reference, folder)
    if path.is_file():
        return []
    remedy = "no such file; put the data there"
    if FOLDER in reference:
        remedy += f", or set task_evaluation.folder, now {folder}, to the folder that holds it"
    return [Fault(field, str(path), remedy)]


def _filled(reference: str, folder: Path | None) -> Path:
    return Path(reference.replace(FOLDER, str(folder)))


def _data_files(definition: Mapping[str, Any]) -> dict[str, list[str]]:
    """{split: paths} of a definition that reads local files.

    Raises:
        InputError: It reads a directory, of which nothing would be copied.
    """
    path = str(definition.get("dataset_path"))
    if path not in LOCAL:
        if FOLDER in path or Path(path).is_absolute() or path.startswith("."):
            raise InputError(Fault("definition.dataset_path", path, _NAME_FILES))
        return {}
    files = (definition.get("dataset_kwargs") or {}).get("data_files")
    named = files if isinstance(files, dict) else {"train": files}  # as datasets calls them
    found: dict[str, list[Any]] = {
        split: own if isinstance(own, list) else [own] for split, own in named.items()
    }
    if not found or not all(isinstance(path, str) for own in found.values() for path in own):
        raise InputError(Fault("definition.dataset_kwargs.data_files", files, _NAME_FILES))
    for split in found:
        if not SPLIT.fullmatch(str(split)):
            remedy = "names a file that its rows are copied to; use letters, digits, - and _"
            raise InputError(Fault("definition.dataset_kwargs.data_files", split, remedy))
    return found


def _rows(rows: Iterable[Mapping[str, Any]], out: Path) -> dict[str, Any]:
    """Write items as JSON lines; returns what a definition says about them."""
    file = f"{DATA}/test.jsonl"
    (out / file).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": [file]}},
        "test_split": "test",
    }


def _copy_data(definition: Mapping[str, Any], out: Path, folder: Path | None) -> dict[str, Any]:
    """Copy a definition's local data; returns what it has to say about where they are now."""
    copied: dict[str, list[str]] = {}
    for split, references in _data_files(definition).items():
        for index, reference in enumerate(references):
            source = _filled(reference, folder)
            copied.setdefault(split, []).append(f"{DATA}/{split}-{index}{source.suffix}")
            shutil.copyfile(source, out / copied[split][-1])
    if not copied:
        return {}
    return {"dataset_kwargs": {**definition["dataset_kwargs"], "data_files": copied}}


def _copy_sources(path: Path, out: Path) -> str:
    """Copy a definition with all that it calls; returns its place in ``out``."""
    places = {source: f"{DEFINITION}/{name}" for name, source in _sources(path).items()}
    for source, place in places.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / place)
    return places[path.resolve()]


def _sources(path: Path) -> dict[str, Path]:
    """A definition, what it includes, and the Python files beside them that they call.

    Returns:
        {path from the innermost folder that holds all of them: file}.
    """
    found = list(_definitions(path, "definition"))
    for file in tuple(found):
        for module in re.findall(r"!function\s+['\"]?([\w.]+)\.\w+", file.read_text()):
            beside = (file.parent / Path(*module.split("."))).with_suffix(".py")
            if beside.is_file():
                found.append(beside)
    base = os.path.commonpath([file.parent for file in found])
    return {file.relative_to(base).as_posix(): file for file in found}
