"""A process that is forked is what Python would have started."""

import json
import logging
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests import warm

SAYS = """
import json, os, sys
here = {"argv": sys.argv, "words": sys.orig_argv, "cwd": os.getcwd(), "path": sys.path}
here |= {"input": sys.stdin.read()}
here |= {"name": __name__, "watched": "sitecustomize" in sys.modules}
ours = ("upcycle_core", "infra", "tasks", "flows", "tests", "prefect", "ray")
here["ours"] = sorted(name for name in sys.modules if name.partition(".")[0] in ours)
here["environment"] = {**os.environ}
print(json.dumps(here))
print("to people", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "-m of a package", "file", "-P file"])
def test_it_is_what_python_starts(tmp_path, kind):
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import sys; print(sys.argv, sys.orig_argv)")
    (tmp_path / "package" / "says.py").write_text(SAYS)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import sys; sys.path.append('mine')")
    command = {
        "-c": ["-c", SAYS],
        "-m": ["-m", "says"],
        "-m of a package": ["-m", "package.says"],
        "file": [str(tmp_path / "says.py")],
        "-P file": ["-P", str(tmp_path / "says.py")],
    }[kind]
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
    *before, text = done.stdout.splitlines()
    *expected_before, expected_text = cold.stdout.splitlines()
    assert before == expected_before
    told, expected = json.loads(text), json.loads(expected_text)
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


ENDS = {
    "said to the end": "print('last', end='')",
    "a number": "sys.exit(300)",
    "below zero": "sys.exit(-1)",
    "no number": "sys.exit('to people')",
    "nothing": "sys.exit(None)",
    "an error": "1 / 0",
    "Ctrl-C": "raise KeyboardInterrupt",
    "a thread": "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "what was to be done": "atexit.register(print, 'done'); atexit.register(print, 'before')",
    "a folder": "folder = tempfile.TemporaryDirectory(dir='.'); print(len(os.listdir('.')))",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_python_does(tmp_path, code):
    code = f"import atexit, os, sys, tempfile, threading, time; {code}"
    given = {"cwd": tmp_path, "env": dict(os.environ)}
    cold = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **given)
    done = warm.run(["-c", code], timeout=60, **given)
    assert (done.returncode, done.stdout) == (cold.returncode, cold.stdout)
    assert done.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]
    assert not list(tmp_path.iterdir())


def test_what_takes_too_long_is_killed(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    said, seconds = "", 1
    while not said:  # a machine may be busy
        with pytest.raises(subprocess.TimeoutExpired) as raised:
            warm.run(["-c", code], cwd=tmp_path, env=dict(os.environ), timeout=seconds)
        said, seconds = raised.value.output, 2 * seconds
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(said)):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


def test_who_asks_and_goes_away_ends_nothing(tmp_path):
    for said in (b"", b"00000100", b"00000004{..}", b"no number"):
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(warm.address())
            server.sendall(said)
    given = {"cwd": tmp_path, "env": dict(os.environ), "timeout": 60}
    assert warm.run(["-c", "print('there')"], **given).stdout == "there\n"


def test_an_environment_may_be_large(tmp_path):
    env = {**os.environ, **{f"LARGE_{n}": "x" * 100_000 for n in range(20)}}
    code = "import os; print(sum(map(len, os.environ.values())) > 2_000_000)"
    done = warm.run(["-c", code], cwd=tmp_path, env=env, timeout=60)
    assert done.stdout == "True\n"


PREFECT = """
import json, logging, os, sys
before = [name for name in sys.modules if name.partition(".")[0] == "prefect"]
os.environ["PREFECT_API_URL"] = "http://127.0.0.1:1/api"
from prefect import flow
import prefect
from prefect import settings
from prefect.logging import get_logger
said = {"before": before, "url": settings.PREFECT_API_URL.value()}
said |= {"home": str(settings.PREFECT_HOME.value()), "origin": prefect.__spec__.origin}
logger = logging.getLogger("prefect")
said |= {"level": logger.level, "handlers": [handler.level for handler in logger.handlers]}
get_logger().info("to people")
print(json.dumps(said))
"""


def test_prefect_reads_the_environment_where_it_is_imported(tmp_path):
    env = {**os.environ, "PREFECT_HOME": str(tmp_path), "PREFECT_LOGGING_LEVEL": "WARNING"}
    given = {"cwd": tmp_path, "env": env, "timeout": 60}
    run = {"capture_output": True, "text": True, **given}
    cold = subprocess.run([sys.executable, "-c", PREFECT], **run)
    done = warm.run(["-c", PREFECT], **given)
    assert done.stderr == cold.stderr == ""
    said = json.loads(done.stdout)
    assert said == json.loads(cold.stdout)
    assert said["url"] == "http://127.0.0.1:1/api"
    assert (said["home"], said["level"]) == (str(tmp_path), logging.WARNING)


WORKERS = """
import json, os, sys, psutil, ray

def seen():
    return "mlflow.genai" in sys.modules, psutil.Process().ppid(), os.environ.get("OURS")

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
try:
    task, own = ray.remote(seen), {"env_vars": {"OURS": "1"}}
    tasks = [task.remote(), task.options(runtime_env=own).remote()]
    print(json.dumps([ray.get(one) for one in tasks]))
finally:
    ray.shutdown()
"""


@pytest.mark.faults
def test_rays_workers_are_forked_too(tmp_path):
    """Those that Ray starts as they are, and those that it prepares an environment for."""
    watching = str(warm.ROOT / "tests" / "watching")
    env = {**os.environ, "PYTHONPATH": watching, "UPCYCLE_TEST_WARM": warm.address()}
    done = warm.run(["-c", WORKERS], cwd=tmp_path, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    [parent] = {first[1], second[1]}
    assert str(warm.ROOT / "tests" / "forking.py") in psutil.Process(parent).cmdline()
    assert [first[::2], second[::2]] == [[True, None], [True, "1"]]
