"""One Prefect server for all flows of a test process: each would bring its own, for ten seconds."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_SECONDS = 300
IDLE = (
    "SCHEDULER",
    "LATE_RUNS",
    "CANCELLATION_CLEANUP",
    "FOREMAN",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
)
"""Services that look at the database every few seconds, for what no test waits for here."""
_running: list[subprocess.Popen] = []
_urls: list[str] = []


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def prefect_server() -> str:
    """The address of the server's API; the first call starts it."""
    if not _urls:
        port, home = free_port(), Path(os.environ["PREFECT_HOME"]) / "shared"
        home.mkdir(parents=True)
        off = {f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in IDLE}
        with (home / "server.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **off, "PREFECT_HOME": str(home)},
            )
        _running.append(process)
        url = f"http://127.0.0.1:{port}/api"
        _wait(process, f"{url}/health", home / "server.log")
        _urls.append(url)
    return _urls[0]


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
