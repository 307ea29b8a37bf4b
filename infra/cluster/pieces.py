"""What a piece is, and its files: a piece is finished when its result is recorded beside them."""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.cluster.worker import Performed
from infra.durable import is_whole, read_json, sealed, sync_tree, write_atomically
from infra.recipe.resources import Placement

FACTS = ("result", "started", "ended", "peak_memory_bytes")
LEFT_FILES = "left_files"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One call for Ray.

    Args:
        name: Unique in its stage; names its files.
        function: Module-level function; gets ``out: Path``, ``progress`` and ``arguments``, and
            returns something JSON can hold.
        arguments: Keyword arguments.
        workers: How many processes call it at once, torch.distributed ready (gloo on CPUs, nccl on
            GPUs), each with the resources of a piece. They share ``out``; rank 0 reports, and what
            it returns is the result.
        placement: Whether several are on as few machines as possible, or on as many.
        each: Arguments, mappings of the same keys, whose entries are computed apart from each
            other: the result has one for each key, whichever others there are.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    placement: Placement = "pack"
    each: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], /, **arguments: Any) -> "Piece":
        """``function`` called with ``arguments``, in one process."""
        return cls(name=name, function=function, arguments=arguments)

    @property
    def keys(self) -> list[str]:
        """What ``each`` has an entry for."""
        return list(self.arguments[self.each[0]])

    def only(self, keys: Collection[str]) -> "Piece":
        """The same for some of ``keys``, under a name of its own."""
        if list(keys) == self.keys:
            return self
        some = {name: {key: self.arguments[name][key] for key in keys} for name in self.each}
        mark = hashlib.sha256(json.dumps(list(keys)).encode()).hexdigest()[:8]
        return replace(self, name=f"{self.name}-{mark}", arguments={**self.arguments, **some})


@dataclass(frozen=True)
class Done:
    """A finished piece.

    Args:
        path: Where its files are.
        result: What it returned.
        started: When it began, epoch seconds.
        ended: When it ended.
        peak_memory_bytes: The most memory its process held while it ran, see
            ``infra.cluster.worker.PeakMemory``; of several workers, the largest.
    """

    path: Path
    result: Any
    started: float
    ended: float
    peak_memory_bytes: int


def is_finished(directory: Path, name: str) -> bool:
    """Its result is recorded, and its files were not taken by a stage that was killed then."""
    record = read_record(directory, name)
    return record is not None and (not record["left_files"] or (directory / name).exists())


def read_record(directory: Path, name: str) -> dict[str, Any] | None:
    """What ``finish`` recorded; None if that is not there, or not whole."""
    record = read_json(_result_file(directory, name))
    return record if is_record(record) else None


def is_record(record: Any) -> bool:
    """Whether this was recorded, as it was: no damage, and no earlier version that wrote less."""
    return is_whole(record) and record.keys() >= {*FACTS, LEFT_FILES}


def write_record(directory: Path, name: str, record: Mapping[str, Any]) -> None:
    """Record a result, whole or not at all."""
    write_atomically(_result_file(directory, name), json.dumps(sealed(record)))


def finish(
    directory: Path, name: str, done: Performed, *, unfinished: Path, started: float, ended: float
) -> None:
    """Give a piece's files their name, then record its result: in this order, on the disk too."""
    left_files = unfinished.exists()
    if left_files:
        sync_tree(unfinished)
        unfinished.rename(directory / name)
    record = {
        "result": done.result,
        LEFT_FILES: left_files,
        "started": started,
        "ended": ended,
        "peak_memory_bytes": done.peak_memory_bytes,
    }
    write_record(directory, name, record)


def read_done(directory: Path, name: str) -> Done:
    """Read what ``finish`` recorded."""
    record = json.loads(_result_file(directory, name).read_text())
    return Done(directory / name, **{fact: record[fact] for fact in FACTS})


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _result_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"
