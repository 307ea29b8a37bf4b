"""Ray: where pieces run. The only module that imports it.

A piece is one call of the library that can be killed and run again anywhere. It writes into
``NAME.partial`` and is renamed to ``NAME`` when it is done; ``NAME.json`` then holds its result.
What it reports on its way stands in ``NAME.progress``, one JSON object a line, so that curves
survive a kill and a shared file system is all that a cluster needs.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from infra.recipe import Resources
from infra.settings import Settings
from upcycle_core.errors import Fault, InputError

REPORT_SECONDS = 0.5
PLACEMENT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One call for Ray.

    Args:
        name: Unique in its stage; names its files.
        function: Module-level function; gets ``out: Path``, ``progress`` and ``arguments``, and
            returns something JSON can hold.
        arguments: Keyword arguments.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A finished piece: where its files are, what it returned, and when it ran (epoch seconds)."""

    path: Path
    result: Any
    started: float
    ended: float


class FileProgress:
    """Progress that leaves a worker through a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        self.what = ""
        self.done = 0
        self.shown: dict[str, float] = {}
        self.written = 0.0

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        self.what, self.done = what, 0
        self._write({"start": what, "total": total, "unit": unit, "time": time.time()})

    def advance(self, amount: int = 1, **shown: float) -> None:
        self.done += amount
        self.shown.update(shown)
        if time.monotonic() - self.written > REPORT_SECONDS:
            self._write({"done": self.done, "shown": self.shown, "time": time.time()})

    def finish(self) -> None:
        """Say how far it came: the last step may have been too soon after the one before."""
        self._write({"done": self.done, "shown": self.shown, "time": time.time()})

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._write({"metrics": dict(values), "step": step, "time": time.time()})

    def _write(self, event: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
        self.written = time.monotonic()


class ProgressReader:
    """Reads what a piece has reported since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """New events, oldest first; a line that is still being written waits."""
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self.offset)
            while (line := file.readline()).endswith("\n"):
                self.offset = file.tell()
                yield json.loads(line)


@contextmanager
def cluster(settings: Settings, cpus: int | None, code: Path) -> Iterator[None]:
    """Connect to Ray: a local one of our own, or the one the user named.

    Raises:
        InputError: If this process is connected to Ray already (Ray would silently ignore these
            settings).
    """
    if ray.is_initialized():
        raise InputError(
            Fault("compute", "ray", "this process is connected to Ray already; call ray.shutdown()")
        )
    local = settings.ray_address == "local"
    options: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": 100_000_000}
    ray.init(
        address=settings.ray_address,
        include_dashboard=False if local else None,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={} if local else {"working_dir": str(code), "excludes": [".venv", "workspace"]},
        **(options if local else {}),
    )
    try:
        yield
    finally:
        ray.shutdown()


def run_pieces(
    pieces: Sequence[Piece],
    *,
    directory: Path,
    resources: Resources,
    label: str,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Done]:
    """Run what is not finished, wherever Ray has room, and wait for all.

    Args:
        pieces: What to run; those whose result stands in ``directory`` are not run again.
        directory: Where their files are kept, on storage that all workers share.
        resources: What Ray reserves for each.
        label: Prefix of the Ray task's name.
        watch: Called about twice a second while pieces run.

    Returns:
        Finished pieces by name, in the order given.

    Raises:
        InputError: If Ray has no machine for ``resources``; or what a piece raised.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _check_room(resources)
    remote = ray.remote(max_retries=3, retry_exceptions=False)(_run_piece)
    waiting = [
        remote.options(
            name=f"{label}:{piece.name}", num_cpus=resources.cpus, num_gpus=resources.gpus
        ).remote(directory, piece, resources)
        for piece in pieces
        if not _is_finished(directory, piece.name)
    ]
    try:
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=REPORT_SECONDS)
            watch()
            for reference in ready:
                _get(reference)
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
    watch()
    return {piece.name: _done(directory, piece.name) for piece in pieces}


def progress_file(directory: Path, name: str) -> Path:
    """Where piece ``name`` reports."""
    return directory / f"{name}.progress"


def placements() -> dict[str, list[str]]:
    """Which worker ran which piece, from Ray's own record of events: worker -> task names."""
    found: dict[str, list[str]] = {}
    for event in ray.timeline():
        if event["cat"].startswith("task::"):
            found.setdefault(event["tid"], []).append(event["cat"].removeprefix("task::"))
    return found


def _get(reference: ray.ObjectRef) -> None:
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, InputError) else error) from None


def _check_room(resources: Resources) -> None:
    room = ray.cluster_resources()
    for kind, wanted in (("CPU", resources.cpus), ("GPU", resources.gpus)):
        if wanted > room.get(kind, 0):
            raise InputError(
                Fault(
                    f"compute {kind.lower()}s",
                    wanted,
                    f"Ray has {room.get(kind, 0):g} in all; ask for less, or start Ray with more",
                )
            )


def _run_piece(directory: Path, piece: Piece, resources: Resources) -> None:
    """In the worker: run, rename, record. A second worker on the same piece waits for the first."""
    import torch

    torch.set_num_threads(resources.cpus)
    with (directory / f"{piece.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_finished(directory, piece.name):
            return
        out, partial = directory / piece.name, directory / f"{piece.name}.partial"
        _remove(partial)
        _remove(out)
        progress = FileProgress(progress_file(directory, piece.name))
        started = time.time()
        result = piece.function(out=partial, progress=progress, **piece.arguments)
        progress.finish()
        left_files = partial.exists()
        if left_files:
            partial.rename(out)
        record = {
            "result": result,
            "left_files": left_files,
            "started": started,
            "ended": time.time(),
        }
        temporary = directory / f"{piece.name}.json.partial"
        temporary.write_text(json.dumps(record))
        os.replace(temporary, _result_file(directory, piece.name))


def _result_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


def _is_finished(directory: Path, name: str) -> bool:
    """Its result is recorded, and its files were not taken by a stage that was killed then."""
    try:
        record = json.loads(_result_file(directory, name).read_text())
    except FileNotFoundError:
        return False
    return not record["left_files"] or (directory / name).exists()


def _done(directory: Path, name: str) -> Done:
    record = json.loads(_result_file(directory, name).read_text())
    return Done(directory / name, record["result"], record["started"], record["ended"])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
