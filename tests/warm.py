"""Processes forked from one that has imported what all of them import, for seconds of a CPU each.

Such a process is one of ``python -m MODULE ...``, ``-c CODE ...`` or ``FILE ...`` in all else: it
has the environment, folder and output that were asked for, imports ``sitecustomize`` from its own
path, and ends as Python ends. Nothing of ours is imported before, nor what reads the environment as
it is imported: Prefect and Ray. Ray's workers ask by ``watching/sitecustomize.py``.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

IMPORTED = (
    "mlflow.genai",
    "transformers.trainer",
    "scipy.linalg",
    "sqlalchemy.ext.asyncio",
    "fastapi",
    "griffe",
    "httpx",
    "pendulum",
    "pydantic_settings",
    "prometheus_client",
    "rich.console",
)
ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600
_address: list[str] = []
_starting = threading.Lock()


def address() -> str:
    """The socket of the process that others are forked from; the first call starts it.

    It ends with the process that has asked for it.
    """
    with _starting:
        if not _address:
            path = os.path.join(tempfile.mkdtemp(), "warm")
            server = subprocess.Popen(
                [sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert server.stdout.read(1), "the process that others are forked from has ended"
            _address.append(path)
    return _address[0]


def call(code: str, *arguments: str, **variables: str) -> None:
    """``python -c CODE ARGUMENTS`` in the checkout; variables are added to the environment."""
    env = {**os.environ, **variables}
    done = run(["-c", code, *arguments], cwd=ROOT, env=env, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """``python COMMAND``, as by ``subprocess.run``, with what it wrote.

    Args:
        command: ``-m`` or ``-c`` and what it is followed by, or a file, and arguments.
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
) -> int:
    """Let a process be forked, and wait until it has ended; returns its exit code."""
    request = json.dumps({"command": [*command], "cwd": cwd, "env": dict(env)}).encode()
    descriptors = [file.fileno() for file in outputs]
    socket.send_fds(server, [f"{len(request):08d}".encode()], descriptors)
    server.sendall(request)
    return int(server.recv(16))


def _said(file: TextIO) -> str:
    file.seek(0)
    return file.read()


class Forking:
    """The process that others are forked from.

    Args:
        path: Of the socket that it listens on.
    """

    def __init__(self, path: str) -> None:
        self._children: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._woken, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for file in (sys.stdin, self._listener, self._woken):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Fork until standard input ends; returns what a process that was forked has to run."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno())
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._reap()
                elif key.fileobj is not self._listener:
                    self._gave_up(key.fileobj)
                elif (request := self._fork()) is not None:
                    return request

    def _fork(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        length, outputs, _, _ = socket.recv_fds(client, 8, 2)
        request = json.loads(client.recv(int(length), socket.MSG_WAITALL))
        if (pid := os.fork()) == 0:
            self._leave(client)
            for number, file in enumerate(outputs, 1):
                os.dup2(file, number)
        else:
            self._children[pid] = client
            self._selector.register(client, selectors.EVENT_READ)
        for file in outputs:
            os.close(file)
        return request if pid == 0 else None

    def _leave(self, client: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        others = self._children.values()
        for own in (client, self._listener, self._woken, self._waking, *others):
            own.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            client = self._children.pop(pid)
            self._selector.unregister(client)
            with contextlib.suppress(OSError):  # who gave up does not listen
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            client.close()

    def _gave_up(self, client: Any) -> None:
        for pid, own in self._children.items():
            if own is client:
                os.kill(pid, signal.SIGKILL)


def become(request: Mapping[str, Any]) -> None:
    """Be the process that was asked for, as if Python had just been started for it."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    command = request["command"]
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = os.getcwd() if command[0] in ("-m", "-c") else os.path.dirname(command[0])
    sys.path[:] = [first, *named, *sys.path]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv[:] = [command[0], *command[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(command[1], "<string>", "exec"), vars(module))
    else:
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    """Import, say so, and fork."""
    del sys.path[0]  # this file's folder
    for name in IMPORTED:
        importlib.import_module(name)
    forking = Forking(sys.argv[1])
    gc.collect()
    gc.freeze()
    print("r", end="", flush=True)
    if (request := forking.serve()) is not None:
        become(request)


if __name__ == "__main__":
    main()
