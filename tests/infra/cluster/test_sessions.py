"""What local Rays leave behind, and who may use them."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.cluster.compute import cluster
from infra.cluster.sessions import OURS, claim, left, remove_left, remove_own
from infra.settings import environment_of, read

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import time
from pathlib import Path
from infra import settings
settings.configure()
import ray
from infra.cluster import sessions
from infra.cluster.compute import cluster
sessions.LEAVE_SECONDS = 60  # Ray's processes end when they come to it
with cluster(settings.configure(), 1, Path.cwd()):
    print(ray.get_runtime_context().gcs_address, flush=True)
    input()
"""
ENTER = """
import logging, sys
import ray
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
print("inside")
"""
SECONDS = 60


@pytest.fixture
def folder(tmp_path):
    """A folder for Rays, whose sockets' paths must stay short."""
    short = Path(os.environ["RAY_TMPDIR"]) / tmp_path.name[-4:]
    short.mkdir(exist_ok=True)
    return short


def hold(folder):
    """A process that holds a local Ray, and where that listens."""
    settings = replace(read(os.environ), ray_address="local")
    environment = environment_of(settings, RAY_TMPDIR=str(folder), PYTHONPATH=os.getcwd())
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environment, stdin=pipe, stdout=pipe, text=True
    )
    return process, process.stdout.readline().strip()


def sessions(folder):
    return list((folder / "ray").iterdir())


def enter(address, **variables):
    """What a program says that connects to a Ray of somebody else."""
    words = [sys.executable, "-c", ENTER, address]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", **variables}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.faults
def test_a_ray_is_its_flows_alone_and_leaves_nothing(folder):
    process, address = hold(folder)
    try:
        (session,) = (path for path in sessions(folder) if not path.is_symlink())
        assert stat.S_IMODE(session.stat().st_mode) == 0o700
        done = enter(address, RAY_AUTH_TOKEN="0" * 64)
        assert "inside" not in done.stdout
        assert "ConnectionError" in done.stderr
        started = psutil.Process(process.pid).children(recursive=True)
        (raylet,) = (child for child in started if "raylet" in child.name())
        commands = " ".join(part for child in started for part in child.cmdline())
        for nobody_asked_for in ("dashboard.py", "monitor.py"):
            assert nobody_asked_for not in commands
        (agent,) = (p for p in raylet.cmdline() if p.startswith("--dashboard_agent_command="))
        assert "--minimal" in agent.split()
        done = enter(address, RAY_AUTH_TOKEN=raylet.environ()["RAY_AUTH_TOKEN"])
        assert "inside" in done.stdout, done.stderr[-2000:]
    finally:
        process.communicate("\n", timeout=SECONDS)
    assert process.returncode == 0
    assert sessions(folder) == []


@pytest.mark.faults
def test_what_a_killed_flow_left_goes_when_its_processes_are_gone(folder):
    process, _ = hold(folder)
    here = folder / "ray"
    started = psutil.Process(process.pid).children(recursive=True)
    assert [*left(here)] == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + SECONDS
    while not [*left(here)]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    remove_left(here)
    assert sessions(folder) == []
    _, alive = psutil.wait_procs(started, timeout=1)
    assert not alive


def test_a_session_of_somebody_else_stays(tmp_path):
    strange, ours = tmp_path / "session_1_0", tmp_path / f"session_1_{os.getpid()}"
    for session in (strange, ours):
        (session / "logs").mkdir(parents=True)
    assert claim(tmp_path) == [ours]
    remove_left(tmp_path)
    assert strange.exists()
    assert ours.exists()  # its process, this one, is there
    # The number is in use again, by a process that began later.
    owner = json.loads((ours / OURS).read_text())
    (ours / OURS).write_text(json.dumps({**owner, "created": owner["created"] - 100}))
    reader = subprocess.Popen([sys.executable, "-c", "input()", ours], stdin=subprocess.PIPE)
    try:
        while str(ours) not in psutil.Process(reader.pid).cmdline():  # it is ours until it begins
            time.sleep(0.01)
        remove_left(tmp_path)
        assert ours.exists()  # a process names it
    finally:
        reader.communicate(b"\n")
    remove_left(tmp_path)
    assert strange.exists()
    assert not ours.exists()
    ours.mkdir()
    remove_own(tmp_path)  # of a Ray that has not come up
    assert [*tmp_path.iterdir()] == [strange]


def test_a_session_of_another_user_s_process_with_this_number_is_not_ours(tmp_path, monkeypatch):
    left_by_another = tmp_path / f"session_1_{os.getpid()}"
    left_by_another.mkdir(mode=0o755)
    monkeypatch.setattr(os, "getuid", lambda: left_by_another.stat().st_uid + 1)
    assert claim(tmp_path) == []
    assert stat.S_IMODE(left_by_another.stat().st_mode) == 0o755
    assert not any(left_by_another.iterdir())


def asked(url, token=None):
    """The status and body of a page of a dashboard."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, ""


@pytest.mark.faults
def test_a_dashboard_is_on_loopback_for_who_may_read_its_token(folder, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    lines = []
    with cluster(read(os.environ), 1, ROOT, dashboard=lines.append):
        [line] = lines
        address, file = re.fullmatch(
            r"Ray's dashboard: (http://127\.0\.0\.1:\d+); it asks for the token in (\S+)", line
        ).groups()
        token = Path(file)
        assert token.is_relative_to(folder / "ray")
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        assert token.read_text() not in line
        page = f"{address}/nodes?view=summary"
        assert asked(address)[0] == 200  # where a browser is asked for the token
        assert asked(page)[0] == 401
        status, body = asked(page, token.read_text())
        assert status == 200
        assert len(json.loads(body)["data"]["summary"]) == 1
        port = int(address.rpartition(":")[2])
        listening = [
            socket.laddr.ip
            for process in psutil.Process().children(recursive=True)
            for socket in process.net_connections("inet")
            if socket.status == psutil.CONN_LISTEN and socket.laddr.port == port
        ]
        assert listening == ["127.0.0.1"]
    assert sessions(folder) == []
    with pytest.raises(urllib.error.URLError):
        asked(address)
