"""Servers that a test kills, and starts again where they were."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from disturbed import below, kill
from prefect_server import free_port
from project import TIMEOUT


class Server:
    """A program that answers on a port of its own, over a folder.

    Args:
        folder: Where its database and its log lie.
        name: Of the log.
    """

    health = "/health"

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.port, self.log = folder, free_port(), folder / f"{name}.log"
        self.process: subprocess.Popen | None = None
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        """What is started."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""
        if self.process is None or self.process.poll() is not None:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        deadline = time.monotonic() + TIMEOUT
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def answers(self) -> bool:
        """Whether it is there."""
        try:
            with urllib.request.urlopen(self.url + self.health, timeout=5):
                return True
        except OSError:
            return False

    def kill(self, *_: object) -> int:
        """End it with the processes that answer for it; returns how many there were."""
        if self.process is None or self.process.poll() is not None:
            return 0
        family = below(self.process.pid)
        self.process.kill()
        self.process.wait()
        return 1 + sum(map(kill, family))

    def replace(self, *_: object) -> int:
        """End it, and start it again, as whoever watches over it would."""
        killed = self.kill()
        self.start()
        return killed


class MlflowServer(Server):
    """MLflow's."""

    def command(self) -> Sequence[str]:
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        database = ["--backend-store-uri", f"sqlite:///{self.folder / 'served.db'}"]
        files = ["--artifacts-destination", str(self.folder / "served"), "--serve-artifacts"]
        return [sys.executable, "-m", "mlflow", "server", *place, *database, *files]


class PrefectServer(Server):
    """Prefect's."""

    health = "/api/health"

    def command(self) -> Sequence[str]:
        home = f"PREFECT_HOME={self.folder / 'prefect-server'}"
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        return ["env", home, sys.executable, "-m", "prefect", "server", "start", *place]
