"""Ray: where pieces run.

A piece is one call of the library that can be killed and run again anywhere. It writes into
``NAME.partial`` and is renamed to ``NAME`` when it is done; ``NAME.json`` then holds its result.
What it reports on its way stands in ``NAME.progress``, one JSON object a line, so that curves
survive a kill and a shared file system is all that a cluster needs.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.cluster import sessions
from infra.cluster.answers import brief, get, loss, loss_named
from infra.cluster.calls import made_there
from infra.cluster.capacity import compute_faults, room_faults
from infra.cluster.connection import connect
from infra.cluster.pieces import Done, Piece, finish, is_finished, read_done, remove
from infra.cluster.progress import REPORT_SECONDS, progress_file
from infra.cluster.servers import few_servers
from infra.cluster.shared_storage import look, storage_fault, written_token
from infra.cluster.waiting import Waiting
from infra.cluster.worker import GROUP_FILE, TRAIN_ENVIRONMENT, Performed, WorkerLost, perform
from infra.recipe.resources import ComputeConfig, Resources
from infra.services.stopping import handlers_kept
from infra.settings import Settings, ray_token
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.memory import cores, total_memory

AGAIN: Mapping[str, Any] = {"max_retries": 3, "retry_exceptions": [WorkerLost]}
"""When Ray runs a piece again."""
LOOPBACK = "127.0.0.1"
SERVERS = ("gcs_server", "raylet")
"""Names of the processes without which a local Ray computes nothing."""
_SERVERS: list[psutil.Process] = []
_SEEN: dict[str, dict[str, float]] = {}
"""What each machine of the Ray at work has, or had before it went away."""


@contextmanager
def cluster(
    settings: Settings,
    cpus: int | None,
    code: Path,
    *,
    workspace: Path | None = None,
    dashboard: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Connect to Ray: a local one of our own, or the one the user named.

    The user's gets the code from here, and each of its machines is asked whether it sees the
    workspace.

    Args:
        settings: Name the Ray.
        cpus: Of a local Ray; a cluster brings its own.
        code: The checkout.
        workspace: The folder that all machines must share; the home by default.
        dashboard: Told in a line where the dashboard of a local Ray is, which has none without.

    Raises:
        InputError: If this process is connected to Ray already (Ray would silently ignore these
            settings), there is no Ray where the user says, or a machine of it does not see the
            workspace.
    """
    if ray.is_initialized():
        raise InputError(
            Fault("compute", "ray", "this process is connected to Ray already; call ray.shutdown()")
        )
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if settings.ray_address == "local":
        with _local(settings, cpus, quiet, dashboard):
            yield
        return
    connect(settings, code, quiet)
    try:
        _check_machines(settings.ray_address, workspace or settings.home)
        with made_there():
            yield
    finally:
        ray.shutdown()


@contextmanager
def _local(
    settings: Settings,
    cpus: int | None,
    quiet: Mapping[str, Any],
    dashboard: Callable[[str], None] | None,
) -> Iterator[None]:
    """A Ray of our own, which nobody else can use, and whose folder goes with it."""
    sessions.remove_left(settings.ray_sessions)
    own: dict[str, Any] = {
        "include_dashboard": dashboard is not None,
        "dashboard_host": LOOPBACK,
        "object_store_memory": 100_000_000,
        "_memory": total_memory(),  # as plans count; by default what is free at this moment
    }
    with ray_token() as token:
        try:
            servers = few_servers() if dashboard is None else nullcontext()
            with handlers_kept(), servers:  # at SIGTERM Ray would end before its pieces
                context: Any = ray.init(address="local", num_cpus=cpus or cores(), **quiet, **own)
            _SERVERS[:] = [p for p in psutil.Process().children() if p.name() in SERVERS]
            sessions.claim(settings.ray_sessions)
            if dashboard is not None:
                # Who has the token can run programs here: it is no word for a log.
                file = sessions.write_token(Path(context.address_info["session_dir"]), token)
                address = f"http://{context.dashboard_url}"
                dashboard(f"Ray's dashboard: {address}; it asks for the token in {file}")
            yield
        finally:
            _SERVERS.clear()
            ray.shutdown()
            sessions.remove_own(settings.ray_sessions)


def _check_machines(address: str, folder: Path) -> None:
    """Let every machine run our code, and look at a token file with it; all at once."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _machines()}
    faults = []
    with written_token(folder) as token:
        for node, reference in [(node, _ask(node).remote(token, node)) for node in addresses]:
            try:
                hindrance = ray.get(reference)
                fault = storage_fault(token, node, addresses[node], hindrance)
            except ray.exceptions.RayError as error:
                remedy = (
                    f"its node {addresses[node]} cannot run our code ({brief(error)}); make the "
                    "environment of this checkout on every machine: make env"
                )
                fault = Fault("RAY_ADDRESS", address, remedy)
            faults += [fault] if fault else []
    raise_faults(faults)


def check_room(compute: ComputeConfig) -> None:
    """Look whether the machines of the Ray at work have room for every kind of piece.

    Raises:
        InputError: With every kind that asks for more than any machine has.
    """
    raise_faults(compute_faults(compute, _resources()))


def _ask(node: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(look).options(num_cpus=0, scheduling_strategy=there, name="storage")


def _machines() -> list[dict[str, Any]]:
    """Those that are there; what they have is kept, for Ray forgets it with them."""
    nodes = ray.nodes()
    alive = [node for node in nodes if node["Alive"]]
    for stranger in _SEEN.keys() - {node["NodeID"] for node in nodes}:
        del _SEEN[stranger]  # of a Ray before this one
    _SEEN.update((node["NodeID"], node["Resources"]) for node in alive)
    return alive


def _resources() -> list[dict[str, float]]:
    """What each machine that is there has."""
    return [node["Resources"] for node in _machines()]


def _check_servers() -> None:
    """Look at the processes of our own Ray: it would take half a minute to miss them.

    Raises:
        InputError: One of them has ended.
    """
    for server in _SERVERS:
        if not server.is_running() or server.status() == psutil.STATUS_ZOMBIE:
            raise InputError(loss("one of its processes was killed"))


@loss_named()
def run_pieces(
    pieces: Sequence[Piece],
    *,
    directory: Path,
    resources: Resources,
    label: str,
    watch: Callable[[], None] = lambda: None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Done]:
    """Run what is not finished, wherever Ray has room, and wait for all.

    A machine that is away may come back (a reboot, a spot instance): where none is left that has
    room, that is said and waited for (``Waiting``). What no machine has ever had room for is
    refused at once.

    Args:
        pieces: What to run; those whose result stands in ``directory`` are not run again.
        directory: Where their files are kept, on storage that all workers share.
        resources: What Ray reserves for each, or for each of its workers.
        label: Prefix of the Ray task's name.
        watch: Called about twice a second while pieces run.
        log: Told when pieces begin to wait for a machine.

    Returns:
        Finished pieces by name, in the order given.

    Raises:
        InputError: If Ray has had no machine for ``resources`` for that long, or is gone; or what a
            piece raised.
    """
    directory.mkdir(parents=True, exist_ok=True)
    workers = max((piece.workers for piece in pieces), default=1)
    _machines()  # may be the first look at them
    raise_faults(room_faults(resources, workers, list(_SEEN.values())))
    left = {
        f"{label}:{piece.name}": piece for piece in pieces if not is_finished(directory, piece.name)
    }
    names = {
        _remote(piece, resources, name).remote(directory, piece, resources): name
        for name, piece in left.items()
    }
    waiting = list(names)
    try:
        room = Waiting(resources, workers, label, log)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=REPORT_SECONDS)
            watch()
            _check_servers()
            for reference in ready:
                get(reference, names[reference])
            room.look(_resources())
    finally:
        for reference in waiting:
            with suppress(OSError):  # what ended it counts; Ray's client may have lost Ray
                ray.cancel(reference, force=True)
        for piece in pieces:
            with suppress(OSError):  # or workers that end still write there
                _release(_workers_folder(directory, piece.name))
    watch()
    return {piece.name: read_done(directory, piece.name) for piece in pieces}


def placements() -> dict[str, list[str]]:
    """Which worker ran which piece, from Ray's own record of events: worker -> task names."""
    found: dict[str, list[str]] = {}
    for event in ray.timeline():
        if event["cat"].startswith("task::"):
            found.setdefault(event["tid"], []).append(event["cat"].removeprefix("task::"))
    return found


def _remote(piece: Piece, resources: Resources, name: str) -> Any:
    """The task of a piece. Several workers are not part of it: they reserve for themselves."""
    if piece.workers == 1:
        return _alone(resources.gpus > 0).options(
            name=name,
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            memory=resources.memory,
            accelerator_type=resources.accelerator,
            resources=dict(resources.resources),
        )
    return _together().options(name=name, num_cpus=0, runtime_env={"env_vars": TRAIN_ENVIRONMENT})


@cache
def _alone(uses_gpu: bool) -> Any:
    """The task of every piece in one process: Ray sends each one it is given to all workers.

    CUDA looks once which GPUs a process may use, and the process keeps memory of them: one that
    has had a GPU does one piece. Ray sees to that only where GPUs stand in the task itself.
    """
    once: dict[str, Any] = {"max_calls": 1} if uses_gpu else {}
    return ray.remote(**once, **AGAIN)(_run_piece)


@cache
def _together() -> Any:
    """The same of pieces of several workers.

    What Ray Train leaves behind in the task's process, its controller, ends with that process.
    """
    return ray.remote(max_calls=1, **AGAIN)(_run_piece)


def _run_piece(directory: Path, piece: Piece, resources: Resources) -> None:
    """In the worker: run, rename, record. A second worker on the same piece waits for the first."""
    with (directory / f"{piece.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_finished(directory, piece.name):
            return
        unfinished = directory / f"{piece.name}.partial"
        remove(unfinished)
        remove(directory / piece.name)
        started = time.time()
        done = _perform(directory, piece, resources, unfinished)
        ended = time.time()
        finish(directory, piece.name, done, unfinished=unfinished, started=started, ended=ended)


def _perform(directory: Path, piece: Piece, resources: Resources, out: Path) -> Performed:
    call = partial(piece.function, out=out, **piece.arguments)
    report = progress_file(directory, piece.name)
    if piece.workers == 1:
        return perform(call, report=report, threads=resources.cpus)
    from infra.cluster.distributed import perform_together  # takes seconds, and is seldom needed

    folder = _workers_folder(directory, piece.name)
    _release(folder)
    folder.mkdir()
    try:
        return perform_together(
            call,
            workers=piece.workers,
            placement=piece.placement,
            resources=resources,
            report=report,
            folder=folder,
        )
    finally:
        _release(folder)


def _release(folder: Path) -> None:
    """Give back what the workers of a piece held, if a killed task could not do so itself."""
    group = folder / GROUP_FILE
    if group.exists():
        number = ray.PlacementGroupID(bytes.fromhex(group.read_text()))
        ray.util.remove_placement_group(PlacementGroup(number))
    remove(folder)


def _workers_folder(directory: Path, name: str) -> Path:
    return directory / f"{name}.workers"
