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
    """A program that answers on a port of its own.

    Args:
        folder: Where its log lies.
        command: Its program and arguments; the port is added.
        health: What is asked to see that it is there.
    """

    def __init__(self, folder: Path, command: Sequence[str], health: str) -> None:
        self.log, self.port, self.health = folder / "server.log", free_port(), health
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process: subprocess.Popen | None = None
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""
        if self.process is None or self.process.poll() is not None:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
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


def mlflow_server(folder: Path) -> Server:
    """MLflow's, over a database and files in ``folder``."""
    folder.mkdir()
    database = ["--backend-store-uri", f"sqlite:///{folder / 'served.db'}", "--workers", "1"]
    files = ["--artifacts-destination", str(folder / "served"), "--serve-artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", *database, *files]
    return Server(folder, command, "/health")


def prefect_server(folder: Path) -> Server:
    """Prefect's, over a database in ``folder``."""
    folder.mkdir()
    command = ["env", f"PREFECT_HOME={folder}", sys.executable, "-m", "prefect", "server", "start"]
    return Server(folder, command, "/api/health")
