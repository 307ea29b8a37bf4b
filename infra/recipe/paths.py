"""Relative paths of a recipe, seen from where it is read: pieces run in other folders."""

from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, InputError

FOLDER = "{folder}"
MODELS = ("expert", "model")
"""Keys of a domain, its origin or the seed: a path, or a name on a hub."""


def rooted(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with absolute paths; what is of the wrong kind stays as it is.

    ``folder`` and ``files`` are paths; a model or dataset is one if it is there: ``owner/name``
    could be a repository of a hub.

    Raises:
        InputError: ``~`` of a user who is not there.
    """
    if isinstance(values.get("folder"), str):
        values = values | {"folder": _absolute(values["folder"], "folder")}
    for section in ("domains", "seed_model", "outside", "instructions"):
        if isinstance(values.get(section), dict):
            values = values | {section: _below(values[section], section)}
    return values


def _below(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        at = f"{where}.{key}"
        if key == "files" and isinstance(item, list):
            item = [_absolute(f, at) if isinstance(f, str) else f for f in item]
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
