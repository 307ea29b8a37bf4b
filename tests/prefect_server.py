"""One Prefect server for all flows of a test process: each would bring its own, for ten seconds."""

import fcntl
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path

START_SECONDS = 300
IDLE = (
    "CLEANUP_RECONCILER",
    "DB_VACUUM",
    "SCHEDULER",
    "LATE_RUNS",
    "CANCELLATION_CLEANUP",
    "FOREMAN",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "TRIGGERS",
)
"""Services that look at the database every few seconds, for what no test waits for here."""
TABLES = Path(os.environ["UPCYCLE_TESTS_SHARED"]) / "prefect-tables"
"""A home with the tables of a server that has just started: all migrations take seven seconds."""
_running: list[subprocess.Popen] = []
_urls: list[str] = []


def _own_ports() -> Iterator[int]:
    """Below those that the kernel hands out and beyond Ray's, a share for each process of tests."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    ports = [*range(20_000 + 3000 * number, 23_000 + 3000 * number)]
    random.Random(os.getpid()).shuffle(ports)  # another session may be at work beside this one
    return cycle(ports)


_ports = _own_ports()


def free_port() -> int:
    """A port that nobody listens on, nor is given to anybody else until it is taken."""
    while True:
        port = next(_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def prefect_server() -> str:
    """The address of the server's API; the first call starts it."""
    if not _urls:
        with TABLES.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first makes the tables for all
            _urls.append(_started())
    return _urls[0]


def with_tables(home: Path) -> None:
    """Give a home of Prefect, not there yet, the tables that its server would make."""
    if not TABLES.exists():
        prefect_server()
    shutil.copytree(TABLES, home)


def _started() -> str:
    port, home = free_port(), Path(os.environ["PREFECT_HOME"]) / "shared"
    if TABLES.exists():
        shutil.copytree(TABLES, home)
    home.mkdir(parents=True, exist_ok=True)
    off = {f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in IDLE}
    python = [sys.executable]
    if "PYTEST_XDIST_WORKER" in os.environ:
        python.append(str(Path(__file__).with_name("forked.py")))
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*python, "-m", "prefect", "server", "start", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **off, "PREFECT_HOME": str(home)},
        )
    _running.append(process)
    url = f"http://127.0.0.1:{port}/api"
    _wait(process, f"{url}/health", home / "server.log")
    if not TABLES.exists():
        _keep_tables(home)
    return url


def _keep_tables(home: Path) -> None:
    partial = Path(tempfile.mkdtemp(dir=TABLES.parent))
    with (
        closing(sqlite3.connect(home / "prefect.db")) as made,
        closing(sqlite3.connect(partial / "prefect.db")) as copied,
    ):
        made.backup(copied)
    shutil.copy2(home / "memo_store.toml", partial)  # which blocks the tables have
    partial.rename(TABLES)


def stop() -> None:
    """End what was started."""
    for process in _running:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _running.clear()
    _urls.clear()


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no Prefect server within {START_SECONDS} s\n{log.read_text()[-4000:]}")
