"""Relative paths of a recipe, seen from where it is read: pieces run in other folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe
from upcycle_core.corpora.config import Domain
from upcycle_core.errors import Fault, InputError

FOLDER = "{folder}"
MODELS = ("expert", "model")
"""Keys of a domain, its origin or the seed: a path, or a name on a hub."""
PATHS = ("definitions",)
LISTS = ("files", "task_lists")
SECTIONS = ("domains", "seed_model", "outside", "instructions")


def rooted(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with absolute paths; what is of the wrong kind stays as it is.

    A ``folder``, ``files`` and what tells of Super-NI's tasks are paths; a model or dataset is one
    if it is there: ``owner/name`` could be a repository of a hub.

    Raises:
        InputError: ``~`` of a user who is not there.
    """
    if isinstance(values.get("folder"), str):
        values = values | {"folder": _absolute(values["folder"], "folder")}
    for section in SECTIONS:
        if isinstance(values.get(section), dict):
            values = values | {section: _below(values[section], section)}
    scored, tasks = values.get("task_evaluation"), values.get("tasks")
    if isinstance(scored, dict):
        values = values | {"task_evaluation": _with_paths(scored, "task_evaluation", "folder")}
    if isinstance(tasks, dict):
        rooted_tasks = {name: _task(task, f"tasks.{name}") for name, task in tasks.items()}
        values = values | {"tasks": rooted_tasks}
    return values


def with_folder(recipe: Recipe) -> Recipe:
    """The recipe whose models' paths name its folder; texts and tasks do where they are read."""
    folder = recipe.folder
    if folder is None:
        return recipe

    def filled(model: str | None) -> str | None:
        return None if model is None else model.replace(FOLDER, folder)

    def of(domain: Domain) -> Domain:
        origin = domain.origin
        if origin is not None:
            origin = replace(origin, model=filled(origin.model))
        return replace(domain, expert=filled(domain.expert), origin=origin)

    domains = {name: of(domain) for name, domain in recipe.domains.items()}
    seed_model = replace(recipe.seed_model, model=filled(recipe.seed_model.model))
    return replace(recipe, domains=domains, seed_model=seed_model)


def _task(task: Any, where: str) -> Any:
    """A definition begins at the checkout, unless its path is whole or begins at a home."""
    if not isinstance(task, dict):
        return task
    if isinstance(task.get("definition"), str) and task["definition"].startswith("~"):
        task = _with_paths(task, where, "definition")
    if not isinstance(task.get("superni"), dict):
        return task
    own = _with_paths(task["superni"], f"{where}.superni", "instances", "tasks")
    return task | {"superni": own}


def _with_paths(section: dict[str, Any], where: str, *keys: str) -> dict[str, Any]:
    given = {key: section[key] for key in keys if isinstance(section.get(key), str)}
    return section | {key: _absolute(path, f"{where}.{key}") for key, path in given.items()}


def _below(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        at = f"{where}.{key}"
        if key in LISTS and isinstance(item, list):
            item = [_absolute(f, at) if isinstance(f, str) else f for f in item]
        elif key in PATHS and isinstance(item, str):
            item = _absolute(item, at)
        elif key in (*MODELS, "dataset") and isinstance(item, str):
            item = _absolute(item, at) if _is_there(item, at) else item
        else:
            item = _below(item, at)
        found[key] = item
    return found


def _is_there(path: str, where: str) -> bool:
    absolute = _absolute(path, where)
    try:
        return bool(path) and Path(absolute).exists()
    except (OSError, ValueError):  # too long for a path, or a zero in it: a name, if anything
        return False


def _absolute(path: str, where: str) -> str:
    if path.startswith(FOLDER):
        return path
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:  # ~nobody
        raise InputError(Fault(where, path, f"{error} Write the whole path")) from error
