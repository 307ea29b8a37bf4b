"""Closed forms and scores on a GPU that is none: no tensor is on the wrong device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    command = [sys.executable, "-m", "tests.pretending.closed_form"]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("gpu"))], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_gpu_s_figures_are_the_cpu_s(found, precision):
    there, here = found[f"{precision} gpu"], found[f"{precision} cpu"]
    assert there.keys() == here.keys()
    for name, figures in there.items():
        assert figures == pytest.approx(here[name], rel=TOLERANCE[precision]), name
        if name.endswith("True"):  # held or streamed is the same on either
            assert figures == pytest.approx(there[name.replace("True", "False")], rel=1e-6), name
