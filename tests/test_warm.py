"""A process that is forked is what Python would have started."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests import warm

SAYS = """
import json, os, sys
here = {"argv": sys.argv, "cwd": os.getcwd(), "path": sys.path, "input": sys.stdin.read()}
here |= {"name": __name__, "watched": "sitecustomize" in sys.modules}
ours = ("upcycle_core", "infra", "tasks", "flows", "tests", "prefect", "ray")
here["ours"] = sorted(name for name in sys.modules if name.partition(".")[0] in ours)
here["environment"] = {**os.environ}
print(json.dumps(here))
print("to people", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_it_is_what_python_starts(tmp_path, kind):
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import sys; sys.path.append('mine')")
    command = {"-c": ["-c", SAYS], "-m": ["-m", "says"], "file": [str(tmp_path / "says.py")]}[kind]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "path"), "OURS": "1"}
    given = {"cwd": tmp_path, "env": env, "timeout": 60}
    cold = subprocess.run(
        [sys.executable, *command, "a b"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **given,
    )
    done = warm.run([*command, "a b"], **given)
    told, expected = (json.loads(p.stdout) for p in (done, cold))
    assert told["path"] == [str(tmp_path) if p == "" else p for p in expected["path"]]
    assert {**told, "path": 0} == {**expected, "path": 0}
    assert (done.stderr, done.returncode) == (cold.stderr, cold.returncode) == ("to people\n", 0)


def test_how_it_ends_is_said(tmp_path):
    given = {"cwd": tmp_path, "env": dict(os.environ), "timeout": 60}
    last = "import atexit, sys; atexit.register(print, 'last'); sys.exit(3)"
    ended = warm.run(["-c", last], **given)
    assert (ended.returncode, ended.stdout) == (3, "last\n")
    killed = warm.run(["-c", "import os; os.kill(os.getpid(), 9)"], **given)
    assert killed.returncode == -9
    failed = warm.run(["-c", "1 / 0"], **given)
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr


def test_what_takes_too_long_is_killed(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        warm.run(["-c", code], cwd=tmp_path, env=dict(os.environ), timeout=2)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(raised.value.output)):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)
