"""Calls that read or write what is large: made on a cluster, beside its storage, or else here.

The flow may be a laptop that reaches the storage over a network. A local Ray computes on the flow's
own machine: there nothing is nearer, and a call would only start a process.
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
WAIT_SECONDS = 0.5
_on_cluster, _ended = Event(), Event()
_checks: list[Callable[[], None]] = []


@contextmanager
def made_there() -> Iterator[None]:
    """Make calls on the cluster that this process is connected to, until the block ends."""
    _ended.clear()
    _on_cluster.set()
    try:
        yield
    finally:
        _on_cluster.clear()


def are_made_there() -> bool:
    """Whether what this process computes is computed on a cluster."""
    return _on_cluster.is_set()


def end() -> None:
    """Give up the calls that are waited for, and make no more in this ``made_there``."""
    if _on_cluster.is_set():
        _ended.set()


@contextmanager
def heeding(check: Callable[[], None]) -> Iterator[None]:
    """End calls and programs by what ``check`` raises, whichever thread waits for them.

    Args:
        check: Called twice a second while the block lasts and something is waited for.
    """
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


def near(
    function: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call ``function`` where the files lie that it is given.

    Args:
        function: Module-level, of ours; what it is given and returns is small.
        *args: Its arguments; paths on the storage that all machines share.
        **kwargs: The same.

    Returns:
        What it returns.

    Raises:
        InputError: Raised by it, or Ray is gone.
        KeyboardInterrupt: The flow ends, see ``end``.
        BaseException: What a check of ``heeding`` raises.
    """
    if not are_made_there():
        return function(*args, **kwargs)
    from infra.cluster.answers import call  # imports Ray; who is refused does without

    return call(function, args, kwargs, given_up=_are_given_up)


def _are_given_up() -> bool:
    heed()
    return _ended.is_set()


def heed() -> None:
    """Raise what a check of ``heeding`` raises; for who waits by other means."""
    for check in tuple(_checks):
        check()


def pause(seconds: float) -> None:
    """Wait for some seconds.

    Raises:
        BaseException: What a check of ``heeding`` raises meanwhile.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        heed()
        time.sleep(min(left, WAIT_SECONDS))


def run_program(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or to that of the call that it is run in.

    Args:
        command: The program and its arguments.
        folder: Where it runs.
        environment: All of its environment.

    Returns:
        With what it wrote.

    Raises:
        BaseException: What a check of ``heeding`` raises; the program is killed.
    """
    variables = dict(environment)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=variables, **pipes) as program:
        try:
            while True:
                try:
                    said = program.communicate(timeout=WAIT_SECONDS)
                    return subprocess.CompletedProcess(command, program.returncode, *said)
                except subprocess.TimeoutExpired:
                    pass  # Ray ends a call between two steps of Python, and within none
                heed()
        except BaseException:
            program.kill()
            raise
