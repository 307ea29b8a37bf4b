"""What is on the disk when a function returns, whatever befalls the machine then."""

import json
import os
import shutil
from pathlib import Path
from typing import Any


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


def sync_tree(path: Path) -> None:
    """Bring a file to the disk, or a folder with everything below it."""
    for entry in (path, *path.rglob("*")):
        sync(entry)


def sync(path: Path) -> None:
    """Bring a file's content, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
