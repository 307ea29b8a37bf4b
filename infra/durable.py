"""Small files that are replaced whole, and on the disk before anything else relies on them."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle_core.durable import sync


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 in the place of whatever is at ``path``.

    A kill or a power cut leaves the old text or the new, never half of one.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(text.encode())
    sync(partial)
    if path.is_dir():  # a file cannot take the place of a folder
        shutil.rmtree(path)
    partial.replace(path)
    sync(path.parent)


def read_json(path: Path) -> Any:
    """The plain values in a file; None if it is absent, or a disk has damaged it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


SEAL = "sha256"
"""Key of a record: the hash of all that stands beside it. A flipped bit mostly leaves good JSON."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with a hash of them, by which ``is_whole`` knows them again."""
    # As they will be read: JSON knows no keys but texts.
    rest = json.loads(json.dumps({key: value for key, value in values.items() if key != SEAL}))
    text = json.dumps(rest, sort_keys=True)
    return {**rest, SEAL: hashlib.sha256(text.encode()).hexdigest()}


def is_whole(values: Any) -> bool:
    """Whether what was read is what ``sealed`` returned, to the last bit."""
    return isinstance(values, dict) and values == sealed(values)


def sync_tree(path: Path) -> None:
    """Bring a file to the disk, or a folder with everything below it."""
    for entry in (path, *path.rglob("*")):
        sync(entry)
