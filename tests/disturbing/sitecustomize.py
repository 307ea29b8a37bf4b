"""On the path of every process of ``tests/disturbed.py``, before that of ``tests/watching``.

``UPCYCLE_TEST_HOLDS``: ``PHASE=WHAT:N,...`` stops a piece whose progress on WHAT reaches N, and
``PHASE=METHOD`` a call of MLflow's client, ``PHASE=MODULE/FUNCTION`` any other call, and
``PHASE=>ARTIFACT`` the stage that has begun to make an artifact, until there is a file
``go-PHASE``. The first process that comes there writes its id into ``held-PHASE``; nobody is held
there again.
``UPCYCLE_TEST_FILE_BYTES``: ``FUNCTION:N`` lets no file grow beyond N bytes while a watched core
function runs.
``UPCYCLE_TEST_CLOCK``: seconds by which this process's clock is wrong.
"""

import functools
import importlib.util
import os
import resource
import sys
import time
from pathlib import Path

_watching = Path(__file__).parents[1] / "watching" / "sitecustomize.py"
_spec = importlib.util.spec_from_file_location("watching_sitecustomize", _watching)
watching = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(watching)

CLIENT = "mlflow.tracking.client"
WORKSPACE = "tasks.engine.workspace"
HOLDS = dict(
    part.split("=") for part in os.environ.get("UPCYCLE_TEST_HOLDS", "").split(",") if part
)


def hold(phase):
    """Wait here, if nobody has before."""
    place = Path(os.environ["UPCYCLE_TEST_CALLS"])
    try:
        with open(place.with_name(f"held-{phase}"), "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return
    for _ in range(12000):
        if place.with_name(f"go-{phase}").exists():
            return
        time.sleep(0.05)


def holding(advance):
    @functools.wraps(advance)
    def call(self, amount=1, **shown):
        advance(self, amount, **shown)
        for phase, at in HOLDS.items():
            what, colon, count = at.partition(":")
            if colon and self.what.startswith(what) and self.done >= int(count):
                hold(phase)

    return call


def held_before(method, phase):
    @functools.wraps(method)
    def call(*args, **kwargs):
        hold(phase)
        return method(*args, **kwargs)

    return call


def held_in(stage):
    @functools.wraps(stage)
    def call(self, artifact):
        staged = stage(self, artifact)
        for phase, at in HOLDS.items():
            if at == f">{artifact}":
                hold(phase)
        return staged

    return call


def limited(function, size):
    @functools.wraps(function)
    def call(*args, **kwargs):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            return function(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return call


class Disturber(watching.Watcher):
    """Beside what is counted: what is held, and what has too little room."""

    def exec_module(self, module):
        super().exec_module(module)
        if module.__name__ == "infra.cluster.progress":
            module.FileProgress.advance = holding(module.FileProgress.advance)
        if module.__name__ == CLIENT:
            for phase, name in HOLDS.items():
                if hasattr(module.MlflowClient, name):
                    method = getattr(module.MlflowClient, name)
                    setattr(module.MlflowClient, name, held_before(method, phase))
        if module.__name__ == WORKSPACE:
            module.Workspace.stage = held_in(module.Workspace.stage)
        for phase, at in HOLDS.items():
            name, slash, path = at.partition("/")
            if slash and name == module.__name__:
                *holders, last = path.split(".")
                holder = functools.reduce(getattr, holders, module)
                setattr(holder, last, held_before(getattr(holder, last), phase))
        name, _, size = os.environ.get("UPCYCLE_TEST_FILE_BYTES", "").partition(":")
        if name in watching.WATCHED[module.__name__]:
            setattr(module, name, limited(getattr(module, name), int(size)))


if "UPCYCLE_TEST_CALLS" in os.environ:
    named = {at.partition("/")[0] for at in HOLDS.values() if "/" in at and at[0] != ">"}
    for module in (CLIENT, WORKSPACE, *named):
        watching.WATCHED.setdefault(module, ())
    sys.meta_path[:] = [
        Disturber() if isinstance(found, watching.Watcher) else found for found in sys.meta_path
    ]
if shift := float(os.environ.get("UPCYCLE_TEST_CLOCK", 0)):
    time.time = lambda now=time.time: now() + shift
    time.time_ns = lambda now=time.time_ns: now() + int(shift * 1e9)
