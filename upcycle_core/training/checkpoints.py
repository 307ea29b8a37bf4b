"""Checkpoints that survive a kill: one counts only once its completion marker is on the disk.

The marker holds the size of every file, the hash of those that hold JSON, and its own: one that a
disk has cut off or damaged later counts no more. (Weights are too large to be hashed every time.)
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.writer import sync_directory, sync_file

MARKER = "complete.json"
PREFIX = "checkpoint-"
SIZES, DIGESTS, SEAL = "sizes", "sha256", "seal"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Args:
        directory: Where it lies (``checkpoint-<step>``).
        record: What ``mark_complete`` was given.
    """

    directory: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that it holds."""
        return _step(self.directory)


def mark_complete(directory: Path, record: dict[str, Any]) -> None:
    """Put everything in ``directory`` on the disk, and only then its marker.

    Args:
        directory: A checkpoint whose files are all written.
        record: JSON values that ``newest_complete`` gives back.
    """
    for path in directory.rglob("*"):
        sync_directory(path) if path.is_dir() else sync_file(path)
    sync_directory(directory)
    sync_directory(directory.parent)
    unfinished = directory / f"{MARKER}.tmp"
    whole = {**record, SIZES: _sizes(directory), DIGESTS: _digests(directory)}
    marker = {**whole, SEAL: _seal(whole)}
    unfinished.write_text(json.dumps(marker, indent=2, sort_keys=True))
    sync_file(unfinished)
    unfinished.replace(directory / MARKER)
    sync_directory(directory)


def newest_complete(checkpoints: Path) -> Checkpoint | None:
    """The whole checkpoint with the most steps, or None."""
    return next((found for found in map(_whole, reversed(_marked(checkpoints))) if found), None)


def discard_incomplete(checkpoints: Path, *, one_is_kept: bool = True) -> None:
    """Delete what a kill or a disk left behind: checkpoints that are not whole.

    Args:
        checkpoints: Directory of one training's checkpoints.
        one_is_kept: Whether a training may end with another than its last. Those after one that a
            disk has cut off go too then: it may be the best, which none of them replaces.
    """
    marked = _marked(checkpoints)
    whole = set(takewhile(_whole, marked) if one_is_kept else filter(_whole, marked))
    for directory in set(checkpoints.glob(f"{PREFIX}*")) - whole:
        shutil.rmtree(directory)


def keep_newest(checkpoints: Path, *, count: int, spare: int | None = None) -> None:
    """Delete all marked checkpoints but the newest ``count`` and that of step ``spare``."""
    for directory in _marked(checkpoints)[:-count]:
        if _step(directory) == spare:
            continue
        # The marker goes first: a kill in between must not leave half a checkpoint that counts.
        (directory / MARKER).unlink()
        sync_directory(directory)
        shutil.rmtree(directory)


def _whole(directory: Path) -> Checkpoint | None:
    """A marked checkpoint, or None if its marker or its files are not what they were."""
    record = _read_marker(directory)
    if record is None:
        return None
    # A checkpoint of an older version has none of them.
    sizes, digests = record.pop(SIZES, {}), record.pop(DIGESTS, {})
    if not sizes.items() <= _sizes(directory).items():
        return None
    return Checkpoint(directory, record) if digests.items() <= _digests(directory).items() else None


def _read_marker(directory: Path) -> dict[str, Any] | None:
    """What ``mark_complete`` wrote; None if a disk has damaged it."""
    try:
        marker = json.loads((directory / MARKER).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict):
        return None
    seal = marker.pop(SEAL, None)  # as above
    return marker if seal in (None, _seal(marker)) else None


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _marked(checkpoints: Path) -> list[Path]:
    return sorted((marker.parent for marker in checkpoints.glob(f"{PREFIX}*/{MARKER}")), key=_step)


def _sizes(directory: Path) -> dict[str, int]:
    """{file: bytes} of all but the marker."""
    return {name: path.stat().st_size for name, path in _files(directory, "*")}


def _digests(directory: Path) -> dict[str, str]:
    """{file: sha256} of those that hold JSON, all but the marker."""
    return {name: sha256_file(path) for name, path in _files(directory, "*.json")}


def _files(directory: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    for path in directory.rglob(pattern):
        if path.is_file() and path.name not in (MARKER, f"{MARKER}.tmp"):
            yield str(path.relative_to(directory)), path


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix(PREFIX))
