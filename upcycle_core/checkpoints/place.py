"""Directories that are written whole: never over something else, and there when complete."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from upcycle_core.checkpoints.writer import sync_directory
from upcycle_core.errors import Fault

PARTIAL, LOCK = ".partial", ".lock"
"""End the names of what lies beside a directory while it is written."""


def place_faults(out: Path, *sources: Path | None) -> list[Fault]:
    """Why ``out`` cannot be written without touching something else."""
    faults = []
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        faults.append(Fault("out", str(out), "is not empty; give a new directory"))
    whole = out.resolve()
    for source in (Path(source).resolve() for source in sources if source is not None):
        if source == whole or source in whole.parents:
            remedy = f"lies in {source}, which is only read; give another directory"
            faults.append(Fault("out", str(out), remedy))
    return faults


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Give a directory beside ``out`` that becomes ``out`` at the end, or is removed on an error.

    Args:
        out: Not there, or empty; a link stays one, and what it names is written.
    """
    out = out.resolve()
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(partial)
    partial.replace(out)
    sync_directory(out.parent)


def make_once(out: Path, write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill ``out``, unless it is there; of several processes that ask, one does.

    Args:
        out: Where the result appears when it is whole.
        write: Fills an empty directory.

    Returns:
        ``out``.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f"{out.name}{LOCK}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.is_dir():
            with new_directory(out) as partial:
                write(partial)
    return out
