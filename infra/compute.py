"""Ray: where pieces run. It and `infra.distributed` alone import it.

A piece is one call of the library that can be killed and run again anywhere. It writes into
``NAME.partial`` and is renamed to ``NAME`` when it is done; ``NAME.json`` then holds its result.
What it reports on its way stands in ``NAME.progress``, one JSON object a line, so that curves
survive a kill and a shared file system is all that a cluster needs.
"""

import fcntl
import json
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from infra.progress import REPORT_SECONDS, FileProgress, ProgressReader, progress_file
from infra.resources import Resources
from infra.settings import Settings
from infra.worker import GROUP_FILE, Performed, WorkerLost, perform
from upcycle_core.errors import Fault, InputError, raise_faults

__all__ = [
    "Done",
    "FileProgress",
    "Piece",
    "ProgressReader",
    "cluster",
    "placements",
    "progress_file",
    "run_pieces",
]

FACTS = ("result", "started", "ended", "peak_memory_bytes")
# Of the tasks that start several workers, and so of their workers. Left alone, Ray Train watches
# for machines that a cloud takes back, looks after its workers every two seconds only, replaces
# print, and lets workers run in a folder of its own.
TRAIN_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


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
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1


@dataclass(frozen=True)
class Done:
    """A finished piece.

    Args:
        path: Where its files are.
        result: What it returned.
        started: When it began, epoch seconds.
        ended: When it ended.
        peak_memory_bytes: The most memory its process held while it ran, see
            ``infra.worker.PeakMemory``; of several workers, the largest.
    """

    path: Path
    result: Any
    started: float
    ended: float
    peak_memory_bytes: int


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
        resources: What Ray reserves for each, or for each of its workers.
        label: Prefix of the Ray task's name.
        watch: Called about twice a second while pieces run.

    Returns:
        Finished pieces by name, in the order given.

    Raises:
        InputError: If Ray has no machine for ``resources``; or what a piece raised.
    """
    directory.mkdir(parents=True, exist_ok=True)
    raise_faults(_room_faults(resources, max((piece.workers for piece in pieces), default=1)))
    waiting = [
        _remote(piece, resources, f"{label}:{piece.name}").remote(directory, piece, resources)
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
        for piece in pieces:
            _release(_workers_folder(directory, piece.name))
    watch()
    return {piece.name: _done(directory, piece.name) for piece in pieces}


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


def _room_faults(resources: Resources, workers: int) -> Iterator[Fault]:
    """What no machine of this Ray can give."""
    room = ray.cluster_resources()
    for kind, each in (("CPU", resources.cpus), ("GPU", resources.gpus)):
        if each * workers > room.get(kind, 0):
            remedy = f"Ray has {room.get(kind, 0):g} in all; ask for less, or start Ray with more"
            share = f" ({each:g} for each of {workers} workers)" if workers > 1 else ""
            yield Fault(f"compute {kind.lower()}s", each * workers, remedy + share)
    if workers > 1 and 0 < resources.gpus < 1:
        remedy = "workers that compute together need whole GPUs (NCCL); ask for 1, or for 1 worker"
        yield Fault("compute gpus", resources.gpus, remedy)


def _remote(piece: Piece, resources: Resources, name: str) -> Any:
    """The task of a piece. Several workers are not part of it: they reserve for themselves."""
    again: dict[str, Any] = {"max_retries": 3, "retry_exceptions": [WorkerLost]}
    if piece.workers == 1:
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        return ray.remote(**again)(_run_piece).options(name=name, **options)
    # What Ray Train leaves behind in the task's process, its controller, ends with that process.
    return ray.remote(max_calls=1, **again)(_run_piece).options(
        name=name, num_cpus=0, runtime_env={"env_vars": TRAIN_ENVIRONMENT}
    )


def _run_piece(directory: Path, piece: Piece, resources: Resources) -> None:
    """In the worker: run, rename, record. A second worker on the same piece waits for the first."""
    with (directory / f"{piece.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_finished(directory, piece.name):
            return
        out, unfinished = directory / piece.name, directory / f"{piece.name}.partial"
        _remove(unfinished)
        _remove(out)
        started = time.time()
        done = _perform(directory, piece, resources, unfinished)
        left_files = unfinished.exists()
        if left_files:
            unfinished.rename(out)
        record = {
            "result": done.result,
            "left_files": left_files,
            "started": started,
            "ended": time.time(),
            "peak_memory_bytes": done.peak_memory_bytes,
        }
        temporary = directory / f"{piece.name}.json.partial"
        temporary.write_text(json.dumps(record))
        os.replace(temporary, _result_file(directory, piece.name))


def _perform(directory: Path, piece: Piece, resources: Resources, out: Path) -> Performed:
    call = partial(piece.function, out=out, **piece.arguments)
    report = progress_file(directory, piece.name)
    if piece.workers == 1:
        return perform(call, report=report, threads=resources.cpus)
    from infra.distributed import perform_together  # takes seconds, and is seldom needed

    folder = _workers_folder(directory, piece.name)
    _release(folder)
    folder.mkdir()
    try:
        return perform_together(
            call, workers=piece.workers, resources=resources, report=report, folder=folder
        )
    finally:
        _release(folder)


def _release(folder: Path) -> None:
    """Give back what the workers of a piece held, if a killed task could not do so itself."""
    group = folder / GROUP_FILE
    if group.exists():
        ray.util.remove_placement_group(pickle.loads(group.read_bytes()))
    _remove(folder)


def _workers_folder(directory: Path, name: str) -> Path:
    return directory / f"{name}.workers"


def _result_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


def _is_finished(directory: Path, name: str) -> bool:
    """Its result is recorded, and its files were not taken by a stage that was killed then."""
    try:
        record = json.loads(_result_file(directory, name).read_text())
    except FileNotFoundError:
        return False
    if not record.keys() >= set(FACTS):  # an earlier version wrote less
        return False
    return not record["left_files"] or (directory / name).exists()


def _done(directory: Path, name: str) -> Done:
    record = json.loads(_result_file(directory, name).read_text())
    return Done(directory / name, **{fact: record[fact] for fact in FACTS})


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
