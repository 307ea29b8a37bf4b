"""One flow at a time in a workspace: the others wait in a queue, and say for whom.

The kernel keeps the queue: each who waits holds a file of its own in ``.waiting``, so that one that
was killed has left the queue by that. Each flow run holds one there too, until its process ends.
"""

import atexit
import fcntl
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import MissingContextError
from prefect.runtime import flow_run
from prefect.states import Running

from infra.recipe.schema import Recipe
from infra.temporary import hold
from tasks.engine.workspace import NO_LINKS, Held, Workspace
from upcycle_core.errors import Fault

WAITING = "Waiting"
"""Prefect's name of the state of a run that waits."""
POLL_SECONDS = 0.5
PLACES, RUNS = "[0-9]*", "run@*"
"""Of files in ``.waiting``."""
WHERE = "upcycle.where"
"""Label of a flow run: the id of the home that it works in, see ``identity``."""

_logger = logging.getLogger(__name__)
_held_till_the_end: list[TextIO] = []


@contextmanager
def turn(workspace: Workspace, holder: str, recipe: Recipe) -> Iterator[None]:
    """Hold the workspace, after those that hold it and those that waited before.

    Args:
        workspace: What is held.
        holder: Who holds it then, for the others.
        recipe: ``compute.wait_minutes`` says how long to wait at most.

    Raises:
        Held: The time is over; it is still held.
        InputError: A symbolic link leads out of the workspace.
    """
    with ExitStack() as stack:
        try:
            _take(stack, workspace, holder, first=not any(_queue(workspace.root)))
        except Held:
            if not recipe.compute.wait_minutes:
                raise
            _wait(stack, workspace, holder, recipe.compute.wait_minutes)
        live(workspace.root.parent, workspace.root.name)
        yield


def live(home: Path, name: str = "") -> None:
    """Let others see, until this process ends, that its flow run is alive.

    It has let go of its workspace before Prefect hears how it has ended.

    Args:
        home: Where the workspace is, or would be.
        name: The workspace's; none, where a flow holds none.
    """
    root = home / name
    with suppress(OSError):  # a full disk, or another user's workspace: no more than a sign
        runs = [*_held(root, RUNS)]  # what others have left goes
        if flow_run.id is None or not root.is_dir():  # where none is, nobody looks
            return
        place = root / ".waiting" / f"run@{flow_run.id}"
        if place not in runs:
            _held_till_the_end.append(hold(place))
            atexit.register(place.unlink, missing_ok=True)
            _say_where(identity(home))


def identity(home: Path) -> str | None:
    """What tells a home from others whose runs the same Prefect server has, and moves with it.

    Two homes may have workspaces of one name, and two machines homes of one path.

    Args:
        home: The home.

    Returns:
        None where it is not there, or cannot be given one.
    """
    place = home / ".waiting" / "id"
    with suppress(OSError):
        if home.is_dir() and not place.exists():
            place.parent.mkdir(exist_ok=True)
            made = place.with_name(f".{uuid.uuid4().hex}")
            try:
                made.write_text(made.name.removeprefix("."))
                place.hardlink_to(made)
            except FileExistsError:  # another process was faster
                pass
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                made.replace(place)
            finally:
                made.unlink(missing_ok=True)
        return place.read_text()
    return None


def is_alive(root: Path, run: object) -> bool:
    """Whether the flow run of this id waits for the workspace, or its process has not ended.

    Args:
        root: The workspace, or the home as for ``live``.
        run: Its id.
    """
    return any(place.name.endswith(f"@{run}") for place in [*_queue(root), *_held(root, RUNS)])


def log(text: str) -> None:
    """Say a line in the flow's log, or on the terminal where no flow runs."""
    try:
        get_run_logger().info(text)
    except MissingContextError:
        print(text, flush=True)


def _take(stack: ExitStack, workspace: Workspace, holder: str, *, first: bool) -> None:
    """Hold the workspace until ``stack`` ends.

    Raises:
        Held: Another process holds it, or waited before.
    """
    if not first:
        by = workspace.holder() or "a flow that waited before"
        raise Held(Fault("workspace", str(workspace.root), f"held by {by}; wait until it ends"))
    stack.enter_context(workspace.lock(holder))


def _wait(stack: ExitStack, workspace: Workspace, holder: str, minutes: float) -> None:
    began = time.monotonic()
    said = ""
    with _placed(workspace) as place:
        while True:
            first = next(_queue(workspace.root), place) == place
            try:
                _take(stack, workspace, holder, first=first)
                break
            except Held:
                by = workspace.holder() or "another flow"
                if time.monotonic() - began > 60 * minutes:
                    remedy = f"held by {by} for longer than the {minutes:g} minutes of "
                    remedy += "compute.wait_minutes; wait until it ends, or stop it"
                    raise Held(Fault("workspace", str(workspace.root), remedy)) from None
                if by != said:
                    said = by
                    line = f"waiting for {by}, at work in {workspace.root}, {minutes:g} minutes at "
                    _say(f"{line}most", WAITING)
            time.sleep(POLL_SECONDS)
    _say(f"goes on after {time.monotonic() - began:.0f} s", "Running")


def _say(text: str, state: str) -> None:
    """In the log, and in the state that Prefect's lists show."""
    log(text)
    if flow_run.id is None:
        return
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Running(name=state, message=text), force=True)
    except Exception as error:  # of any kind: what is shown is no reason to end
        _logger.warning("Prefect does not show that this flow waits: %s", error)


def _say_where(home: str | None) -> None:
    if home is None or flow_run.id is None:
        return
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(uuid.UUID(flow_run.id), {WHERE: home})
    except Exception as error:  # of any kind, as above
        _logger.warning("Prefect does not hear where this flow works: %s", error)


@contextmanager
def _placed(workspace: Workspace) -> Iterator[Path]:
    """A place at the end of the queue, as long as this process lives and wants it."""
    number = f"{time.time_ns():020}"
    place = workspace.root / ".waiting" / f"{number}@{flow_run.id or uuid.uuid4()}"
    with hold(place):
        try:
            yield place
        finally:
            place.unlink(missing_ok=True)


def _queue(root: Path) -> Iterator[Path]:
    """Places of those that wait and live, the first one first."""
    return _held(root, PLACES)


def _held(root: Path, pattern: str) -> Iterator[Path]:
    """Files of those that live, in order; what killed ones have left goes."""
    for place in sorted((root / ".waiting").glob(pattern)):
        with suppress(FileNotFoundError), place.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield place
            else:
                place.unlink(missing_ok=True)
