"""The harness that benchmarks measure other processes with."""

import os
import sys
import time

import pytest
import torch

from benchmarks.children import call_in_child, child_command, measure_child, memory_mb, run_python

HELD_MB = 200
pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def _children_find_this_file(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def held(megabytes):
    """Hold memory for long enough to be seen."""
    block = torch.ones(megabytes * 1_000_000, dtype=torch.uint8)
    time.sleep(0.2)
    return {"bytes": len(block), "process": os.getpid(), "threads": torch.get_num_threads()}


def refuse(words):
    raise ValueError(f"no {words}")


def write(path):
    path.write_text("here")


def test_a_call_in_a_child_returns_what_it_found_and_the_memory_above_its_imports():
    found = call_in_child(held, HELD_MB)
    assert found["bytes"] == HELD_MB * 1_000_000
    assert found["process"] != os.getpid()
    assert found["threads"] == 1
    assert found["gpu_mb"] == 0
    assert found["before_mb"] > 10
    assert found["memory_mb"] == pytest.approx(HELD_MB, rel=0.2)  # imports leave some garbage


def test_a_failing_call_says_why():
    with pytest.raises(RuntimeError, match="ValueError: no luck"):
        call_in_child(refuse, "luck")


def test_a_commands_time_is_its_own_and_its_childrens():
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    figures = measure_child([sys.executable, "-c", busy])
    assert 0.5 <= figures.cpu_s <= figures.wall_s + 0.1
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    assert measure_child([sys.executable, "-c", outer]).cpu_s >= 0.5


def test_the_command_of_a_call_makes_it(tmp_path):
    made = tmp_path / "made"
    measure_child(child_command(write, made))
    assert made.read_text() == "here"


def test_a_failing_command_of_the_checkout_shows_its_output():
    program = "import sys; print('said'); sys.exit('complained')"
    with pytest.raises(RuntimeError, match=r"(?s)failed.*\nsaid\n.*complained"):
        run_python(["-c", program], environment=os.environ)
    assert run_python(["-c", "import benchmarks.children"], environment=os.environ) > 0


def test_a_process_that_has_ended_holds_nothing():
    assert memory_mb("VmRSS") > memory_mb("RssAnon") > 0
    assert memory_mb("RssAnon", pid=2**22 + 1) == 0
