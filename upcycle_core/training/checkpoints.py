"""Checkpoints that survive a kill: one counts only once its completion marker is on the disk."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle_core.checkpoints.writer import sync_directory, sync_file

MARKER = "complete.json"
PREFIX = "checkpoint-"


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
    unfinished.write_text(json.dumps(record, indent=2, sort_keys=True))
    sync_file(unfinished)
    unfinished.replace(directory / MARKER)
    sync_directory(directory)


def newest_complete(checkpoints: Path) -> Checkpoint | None:
    """The marked checkpoint with the most steps, or None."""
    marked = _marked(checkpoints)
    if not marked:
        return None
    return Checkpoint(marked[-1], json.loads((marked[-1] / MARKER).read_text()))


def discard_incomplete(checkpoints: Path) -> None:
    """Delete what a kill left behind: checkpoints without a marker."""
    for directory in set(checkpoints.glob(f"{PREFIX}*")) - set(_marked(checkpoints)):
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


def _marked(checkpoints: Path) -> list[Path]:
    return sorted((marker.parent for marker in checkpoints.glob(f"{PREFIX}*/{MARKER}")), key=_step)


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix(PREFIX))
