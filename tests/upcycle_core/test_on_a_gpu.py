"""Closed forms and scores on a GPU that is none: no tensor is on the wrong device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.closed_forms import TOLERANCE, assert_alike

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[2]


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
    assert_alike(found[f"{precision} gpu"], found[f"{precision} cpu"], precision)
