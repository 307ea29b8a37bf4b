"""Closed forms and scores on GPUs that are none: no tensor is on the wrong device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.closed_forms import TOLERANCE, assert_alike

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[2]


def printed_by(module, folder):
    command = [sys.executable, "-m", module, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return printed_by("tests.pretending.closed_form", tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_gpu_s_figures_are_the_cpu_s(found, precision):
    assert_alike(found[f"{precision} gpu"], found[f"{precision} cpu"], precision)


def test_what_two_gpus_hold_among_them_answers_as_on_the_cpu(tmp_path):
    found = printed_by("tests.pretending.divided", tmp_path)
    assert len(found["gpus"]) == len(found["cpu"]) == 12
    for name, there in found["gpus"].items():
        here = found["cpu"][name]
        assert there["generated"] == here["generated"], name
        assert there["likelihoods"] == pytest.approx(here["likelihoods"], abs=1e-4), name
    assert len({str(one["generated"]) for one in found["cpu"].values()}) > 6
    for name, there in found["ways gpus"].items():
        assert there == pytest.approx(found["ways cpu"][name], abs=1e-4), name
    assert found["places"] == [["pretended:0", "pretended:1"]] * len(found["places"])
