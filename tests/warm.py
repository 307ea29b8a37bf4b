"""Processes forked from one that has imported what all of them import, for seconds of a CPU each.

Such a process is one of ``python -m MODULE ...``, ``-c CODE ...`` or ``[-P] FILE ...``: it has the
words, environment, folder and output that were asked for, imports ``sitecustomize`` from its own
path, and ends as Python ends. Ray's workers ask by ``watching/sitecustomize.py``, and pytest-xdist
starts its own by ``forked.py``.

Nothing of ours is imported before, nor Ray, whose library a fork of a process that loaded it waits
in for ever. Prefect, which reads the environment as it is imported, seems not to be, and reads it
once more where it is. What reads it earlier is as in the process of tests: libraries of threads,
the folder of models from a hub, the seed of hashes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
SHARED = os.path.join(os.environ.get("UPCYCLE_TESTS_SHARED", ""), "warm")
"""The socket of the one process that all workers of a session ask."""
START_SECONDS = 300
TIMEOUT = 600
_running: list[tuple[subprocess.Popen, str]] = []
_starting = threading.Lock()


def share() -> None:
    """Start the process that all workers of this session ask; it is not waited for."""
    _start(SHARED)


def address() -> str:
    """The socket of the process that others are forked from; the first call starts it.

    It ends, and all that was forked, with the process that has started it.
    """
    with _starting:
        if "PYTEST_XDIST_WORKER" in os.environ:
            path = SHARED
        elif _running:
            path = _running[0][1]
        else:
            path = _start(os.path.join(tempfile.mkdtemp(), "warm"))
        return _listening(path)


def shared() -> str:
    """The socket of the process that ``share`` started, asked for by a child of the same session.

    Raises:
        SystemExit: The session has ended.
    """
    own = os.getppid()
    return _listening(SHARED, lambda: os.getppid() == own)


def _listening(path: str, wanted: Callable[[], bool] = lambda: True) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not os.path.exists(path):
        ended = [server for server, _ in _running if server.poll() is not None]
        assert not ended, "the process that others are forked from has ended"
        assert time.monotonic() < deadline, "it does not start"
        if not wanted():
            raise SystemExit("the session has ended")
        time.sleep(0.05)
    return path


def _start(path: str) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(Path(__file__).with_name("forking.py")), path]
    _running.append((subprocess.Popen(command, stdin=subprocess.PIPE, env=own), path))
    return path


def stop() -> None:
    """End it, if it was started."""
    while _running:
        server, _ = _running.pop()
        server.stdin.close()
        server.wait()


def call(code: str, *arguments: str, **variables: str) -> None:
    """``python -c CODE ARGUMENTS`` in the checkout; variables are added to the environment."""
    env = {**os.environ, **variables}
    done = run(["-c", code, *arguments], cwd=ROOT, env=env, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


def elsewhere(code: str, *arguments: object, folder: Path) -> None:
    """``python -c CODE ARGUMENTS`` in ``folder``, which is its home, with nothing of ours."""
    own = {"PATH": "", "HOME": str(folder), "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    env = {**own, "HF_HUB_OFFLINE": "1"}
    done = run(["-c", code, *map(str, arguments)], cwd=folder, env=env, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """``python COMMAND``, as by ``subprocess.run``, with what it wrote until it ended.

    Args:
        command: ``-m`` or ``-c`` and what it is followed by, or a file, perhaps after ``-P``, and
            arguments.
        cwd: The folder that it runs in.
        env: All of its environment.
        timeout: Seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: It was.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(address())
            server.settimeout(timeout)
            try:
                code = ask(server, command, cwd=str(cwd), env=env, outputs=(out, err))
            except TimeoutError:  # it is killed as the socket closes
                raise subprocess.TimeoutExpired(command, timeout, _said(out), _said(err)) from None
        return subprocess.CompletedProcess(command, code, _said(out), _said(err))


def ask(
    server: socket.socket,
    command: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    outputs: tuple[TextIO, TextIO],
    given: TextIO | None = None,
) -> int:
    """Let a process be forked, and wait until it has ended; it is killed where nobody waits.

    Args:
        server: Connected to the socket.
        command: As for ``run``.
        cwd: As for ``run``.
        env: As for ``run``.
        outputs: What it writes to.
        given: What it reads from; nothing is where it is left out.

    Returns:
        Its exit code, or the signal that ended it as a negative number.

    Raises:
        ConnectionError: The process that others are forked from has ended.
    """
    blocked = [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    asked = {"command": [*command], "cwd": cwd, "env": dict(env), "blocked": blocked}
    request = json.dumps(asked).encode()
    files = outputs if given is None else (*outputs, given)
    descriptors = [file.fileno() for file in files]
    socket.send_fds(server, [f"{len(request):08d}".encode()], descriptors)
    server.sendall(request)
    if not (answer := server.recv(16)):
        raise ConnectionError("the process that others are forked from has ended")
    return int(answer)


def _said(file: TextIO) -> str:
    # Whoever still writes has the same place in the file: it is not moved.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()
