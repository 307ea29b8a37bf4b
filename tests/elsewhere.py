"""An MLflow server over a home, and programs of another machine, which have its address alone."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_server import free_port
from project import ROOT, TIMEOUT

from infra import settings
from infra.services import servers
from infra.services.processes import find, launch, stop
from tests import warm


def home_with_port(home: Path) -> settings.Settings:
    """Of a home whose MLflow server has a port of its own."""
    own = {"UPCYCLE_HOME": str(home), "UPCYCLE_MLFLOW_PORT": str(free_port())}
    return settings.read(own)


@contextmanager
def mlflow_server_of(place: settings.Settings) -> Iterator[str]:
    """The address of the server that `make up` starts, which runs meanwhile."""
    service, log = servers._mlflow(place), place.services / "mlflow.log"
    record = launch(
        (sys.executable, *service.arguments),
        log=log,
        directory=ROOT,
        environment=settings.environment_of(place, **service.environment),
        url=service.url,
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while not service.ready():
            assert find(record) is not None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)
        yield service.url
    finally:
        if (process := find(record)) is not None:
            stop(process, grace=20.0)


class Elsewhere:
    """Another machine: a folder for its own files, and nothing of the home in sight.

    Args:
        folder: Its files.
        hidden: The home, which must not be looked into.
        address: Of the MLflow server.
    """

    def __init__(self, folder: Path, hidden: Path, address: str) -> None:
        self.folder = folder
        own = {
            "HOME": folder,
            "TMPDIR": folder,
            "UPCYCLE_HOME": folder / "workspace",
            "PYTHONPATH": ROOT / "tests" / "hiding",
            "UPCYCLE_TEST_HIDDEN": hidden,
            "MLFLOW_TRACKING_URI": address,
        }
        ours = ("PREFECT_", "UPCYCLE_", "MLFLOW_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment = {**kept, **{name: str(value) for name, value in own.items()}}
        programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environment["PATH"] = os.pathsep.join(programs)

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """What Python says there, of a program or of a module of ours (then ``cwd`` is ROOT)."""
        done = warm.run(arguments, cwd=cwd or self.folder, env=self.environment, timeout=TIMEOUT)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout
