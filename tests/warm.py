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

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
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
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

IMPORTED = (
    "mlflow.genai",
    "mlflow.store.tracking.sqlalchemy_store",
    "matplotlib.backends.backend_agg",
    "transformers.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.integrations.hub_kernels",
    "torch.distributed.tensor",
    "scipy.linalg",
    "sqlalchemy.ext.asyncio",
    "fastapi",
    "dvc.repo",
    "dvc.cli.parser",
    "griffe",
    "httpx",
    "pendulum",
    "pydantic_settings",
    "prometheus_client",
    "rich.console",
    "datasets",
    "peft",
    "scipy.stats",
    "matplotlib.image",
    "rouge_score.rouge_scorer",
    "accelerate",
    "prefect.flows",
    "prefect.server.api.server",
)
ROOT = Path(__file__).resolve().parent.parent
SHARED = os.path.join(os.environ.get("UPCYCLE_TESTS_SHARED", ""), "warm")
"""The socket of the one process that all workers of a session ask."""
START_SECONDS = 300
TIMEOUT = 600
WAIT_SECONDS = 10
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
    command = [sys.executable, __file__, path]
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


class Held(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Prefect, which was imported and seems not to be, until somebody imports it."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "prefect"]
        self._modules: dict[str, Any] = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules["prefect"].__spec__
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "prefect":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._modules["prefect"]

    def exec_module(self, module: types.ModuleType) -> None:
        """Read the environment as the import does."""
        module.__spec__ = self._spec
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        self._modules["prefect.context"].refresh_global_settings_context()


class Forking:
    """The process that others are forked from.

    Args:
        path: Of the socket that it listens on.
    """

    def __init__(self, path: str) -> None:
        self._children: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}.new")
        self._listener.listen(64)
        os.rename(f"{path}.new", path)  # by which others see that it listens
        self._woken, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for file in (sys.stdin, self._listener, self._woken):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Fork until standard input ends, and then end what was forked.

        Returns:
            In a process that was forked: what it has to run.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno())
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    for pid in self._children:
                        os.kill(pid, signal.SIGKILL)
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
        client.settimeout(WAIT_SECONDS)
        outputs: list[int] = []
        try:
            length, outputs, _, _ = socket.recv_fds(client, 8, 3)
            with client.makefile("rb") as stream:
                request = json.loads(stream.read(int(length)))
            pid = os.fork()
        except (OSError, ValueError):  # who asked is gone, or has not said all
            client.close()
            for file in outputs:
                os.close(file)
            return None
        if pid == 0:
            self._leave(client)
            for number, file in zip((1, 2, 0), outputs, strict=False):
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
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
            self._forget(client)
            with contextlib.suppress(OSError):  # nobody waits any more
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            client.close()

    def _forget(self, client: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is forgotten already, or closed too
            self._selector.unregister(client)

    def _gave_up(self, client: Any) -> None:
        self._forget(client)
        for pid, own in self._children.items():
            if own is client:
                os.kill(pid, signal.SIGKILL)


def become(request: Mapping[str, Any]) -> None:
    """Be the process that was asked for, as if Python had just been started for it.

    Args:
        request: What ``ask`` sent.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    command = request["command"]
    sys.orig_argv[:] = [sys.executable, *command]
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if command[0] == "-P":
        command, first = command[1:], []
    else:
        first = [os.getcwd() if command[0] in ("-m", "-c") else os.path.dirname(command[0])]
    sys.path[:] = [*first, *named, *sys.path]
    tempfile.tempdir = None
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    if command[0] == "-m":
        sys.argv[:] = [command[0], *command[2:]]  # while the module is looked for
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv[:] = [command[0], *command[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(command[1], "<string>", "exec"), vars(module))
    else:
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    """Import and fork."""
    del sys.path[0]  # this file's folder
    for name in IMPORTED:
        importlib.import_module(name)
    Held()
    gc.collect()
    gc.freeze()
    forking = Forking(sys.argv[1])
    if (request := forking.serve()) is not None:
        become(request)


if __name__ == "__main__":
    main()
