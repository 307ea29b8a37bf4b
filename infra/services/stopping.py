"""Ctrl-C, SIGTERM and a closed terminal end a command within seconds, with one line.

What a command has begun is put away as the ``KeyboardInterrupt`` travels up. That is a courtesy:
everything can be killed at any moment, so what takes too long, or a second signal, kills the rest.
"""

import gc
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any

import psutil

from infra.settings import INNER, configure, environment_of, is_inner

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINE = "Stopping; the same command goes on where it was."
GRACE_SECONDS = 4.0
"""How long things may take to be put away."""
TAKEN_SECONDS = 15.0
"""The same where a library does it."""

Handler = Callable[[int, FrameType | None], Any]
_OWN: list[Handler] = []
"""That of the command which runs in this process."""


def end_at_once() -> None:
    """From now on a signal ends this process with ``LINE``: for as long as it has begun nothing.

    Python's own way is a traceback through whatever is being imported.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _say()
        _end(number)

    _handle(end)


def run_stoppable(call: Callable[[], int]) -> int:
    """Call ``call`` in the main thread; a signal raises ``KeyboardInterrupt`` in it.

    What it leaves in memory is frozen: the interpreter would look through all that torch and MLflow
    have made once more as it ends, and take two seconds for it.

    Args:
        call: Returns an exit code.

    Returns:
        That exit code; 128 and the signal's number if one came, as shells have it.
    """
    gc.freeze()  # what was imported stays
    gc.enable()
    signals: SimpleQueue[int] = SimpleQueue()  # a handler may put into it, whatever it interrupts
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not received:
            _say()
        signals.put(number)
        received.append(number)
        logging.disable()  # what was asked to stop has no errors to report,
        logging.raiseExceptions = False  # nor that a line on its way to a server was not taken
        raise KeyboardInterrupt

    Thread(target=_end_late, args=(signals,), name="stopping", daemon=True).start()
    before = _handle(stop)
    _OWN.append(stop)
    try:
        return call()
    except BaseException:
        if not received:
            raise
        return 128 + received[0]
    finally:
        gc.freeze()
        _OWN.remove(stop)
        if not received:
            signals.put(0)
            for number, handler in before.items():
                signal.signal(number, handler)


def run_command(words: Sequence[str], *, directory: Path) -> None:
    """Run another command that can be stopped; what stops this one stops it too.

    Args:
        words: Program and arguments.
        directory: Where it runs.

    Raises:
        CalledProcessError: It failed.
    """
    environment = environment_of(configure(), **{INNER: "1"})
    process = subprocess.Popen(words, cwd=directory, env=environment, start_new_session=True)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # of a session of its own, it has heard nothing
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, words)


@contextmanager
def out_of_reach() -> Iterator[None]:
    """Keep Ctrl-C and a closed terminal from what is started meanwhile; from the main thread only.

    The terminal sends them to all processes. This one still hears of them, in its other threads,
    and decides when that what it has started ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Leave signals with whom they are, whoever takes them meanwhile; where that can be done."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if current_thread() is main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def ended_in_time() -> Iterator[None]:
    """Within, a SIGTERM that a library took over ends this process in time.

    While a flow runs, Prefect handles it and tells its server, for more than a minute where that
    was stopped as well: systemd asks all processes of a service. A command of ours is stopped as by
    Ctrl-C; where there is none, Prefect's worker having started the flow, Prefect does its part
    first, within ``TAKEN_SECONDS``.
    """
    theirs = signal.getsignal(signal.SIGTERM)
    if current_thread() is not main_thread() or not callable(theirs):
        yield
        return
    signals: SimpleQueue[int] = SimpleQueue()

    def bounded(number: int, frame: FrameType | None) -> Any:
        signals.put(number)
        return theirs(number, frame)

    Thread(target=_end_taken, args=(signals,), name="ending", daemon=True).start()
    signal.signal(signal.SIGTERM, _OWN[-1] if _OWN else bounded)
    try:
        yield
    finally:
        signals.put(0)
        signal.signal(signal.SIGTERM, theirs)


def _handle(handler: Handler) -> dict[signal.Signals, Any]:
    """Handle all that is not ignored, as it is below nohup; returns what did so before."""
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def _end_late(signals: "SimpleQueue[int]") -> None:
    """Wait for a signal; end the process at the next one, or when time is up."""
    number = signals.get()
    if number:
        with suppress(Empty):
            signals.get(timeout=GRACE_SECONDS)
        _end(number)


def _end_taken(signals: "SimpleQueue[int]") -> None:
    """Wait for a signal that a library handles; end the process when its time is up."""
    number = signals.get()
    if number:
        time.sleep(TAKEN_SECONDS)
        _say()
        _end(number)


def _end(number: int) -> None:
    """End all that this process has started, and then this process."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os._exit(128 + number)


def _say() -> None:
    """Past Python's own streams, which may be at work just then; a terminal has echoed ``^C``."""
    if is_inner():
        return
    with suppress(OSError):  # a terminal that was closed
        os.write(2, f"{chr(10) if os.isatty(2) else ''}{LINE}\n".encode())
