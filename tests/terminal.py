"""A command at a terminal of its own, as a user sits before it."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from project import ROOT, TIMEOUT

CTRL_C = b"\x03"
END_SECONDS = 40
"""Far above the few that it takes on a busy machine, far below the 75 that it once took."""


class Terminal:
    """Runs ``python ARGUMENTS`` in the checkout; the terminal sends its signals to all processes.

    Args:
        arguments: Of Python.
        environment: All of the command's environment.
    """

    def __init__(self, *arguments: str, environment: Mapping[str, str]) -> None:
        self._keyboard, screen = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=dict(environment),
            preexec_fn=partial(_sit_down, screen),
        )
        os.close(screen)
        self._shown = b""
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is left of the command."""
        self.process.kill()
        self.process.wait()
        self._close()

    @property
    def shown(self) -> str:
        """What stands on the screen."""
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, moment: Callable[[], bool]) -> None:
        """Wait until the command has come to a moment."""
        deadline = time.monotonic() + TIMEOUT
        while not moment():
            if self.process.poll() is not None:
                self._reader.join(END_SECONDS)
                assert moment(), f"ended before\n{self.shown[-4000:]}"
                return
            assert time.monotonic() < deadline, f"never came there\n{self.shown[-4000:]}"
            time.sleep(0.05)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._keyboard, keys)

    def press(self, keys: bytes) -> str:
        """Press keys that end the command; returns the lines that it shows from then on.

        The terminal writes its echo beside the command, now before and now after what this says of
        it: here it stands before.
        """
        before = self.shown
        self.type(keys)
        shown = self.rest(before)
        others = shown.replace("^C", "", 1)
        answer = others.find("Stopping")
        if 0 <= answer <= shown.find("^C"):  # or within it
            shown = f"{others[:answer]}^C\n{others[answer:]}"
        return "\n".join(line for line in shown.splitlines() if line)

    def hang_up(self) -> str:
        """Close the terminal."""
        self._close()
        self._end()
        return ""

    def send(self, signal: int) -> str:
        """Send a signal to the command alone; returns what it shows from then on."""
        before = self.shown
        self.process.send_signal(signal)
        return self.rest(before)

    def rest(self, before: str) -> str:
        """What is shown after ``before`` until the command ends."""
        self._end()
        self._reader.join(END_SECONDS)
        return self.shown.removeprefix(before)

    def _end(self) -> None:
        """Wait for the command's end; of one that does not come, say what the process is at."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            folder = Path("/proc", str(self.process.pid))
            state = "\n".join((folder / name).read_text() for name in ("status", "wchan"))
            raise AssertionError(f"goes on; it has shown\n{self.shown[-4000:]}\n{state}") from None

    def _read(self) -> None:
        with suppress(OSError):  # EIO: the last process that had the terminal open has ended
            while not self._closed.is_set():
                if select.select([self._keyboard], [], [], 0.05)[0]:
                    self._shown += os.read(self._keyboard, 65536)

    def _close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._reader.join()  # what is being read is not yet closed
            os.close(self._keyboard)


def _sit_down(screen: int) -> None:
    """Take the terminal, and heed its signals: a job in the background ignores some."""
    os.login_tty(screen)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def processes(name: str, value: str) -> list[str]:
    """Command lines of the processes that were started with a variable."""
    found = []
    for process in with_variable(name, value):
        with suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """The processes that were started with a variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process)
    return found
