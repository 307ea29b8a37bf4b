"""The process that others are forked from: ``python forking.py SOCKET``. See ``warm.py``.

It imports, and forks until its standard input ends.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

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
WAIT_SECONDS = 10


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


def know_files() -> None:
    """Find the files of all modules, as ``inspect`` does once a process that asks whose a line is.

    It would load what is loaded when it is first used, too.
    """
    for name, module in sys.modules.copy().items():
        if isinstance(module, types.ModuleType) and (file := vars(module).get("__file__")):
            inspect._filesbymodname[name] = file
            path = inspect.getabsfile(module)
            inspect.modulesbyfile[path] = inspect.modulesbyfile[os.path.realpath(path)] = name


def end(run: Callable[[], object]) -> NoReturn:
    """Run, and end as Python does after that, but for taking all modules apart.

    That would touch, and so copy, whatever was imported before the fork: half a second of a CPU.

    Args:
        run: What the process was forked for.
    """
    code, interrupted = 0, False
    try:
        run()
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if asked.code is not None and not isinstance(asked.code, int):
            print(asked.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # waits for those that are not daemons, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def main() -> None:
    """Import and fork."""
    del sys.path[0]  # this file's folder
    for name in IMPORTED:
        importlib.import_module(name)
    Held()
    know_files()
    gc.collect()
    gc.freeze()
    forking = Forking(sys.argv[1])
    if (request := forking.serve()) is not None:
        end(partial(become, request))


if __name__ == "__main__":
    main()
