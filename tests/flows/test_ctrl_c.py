"""A flow that is stopped at its terminal while its own Ray and Prefect server are at work."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disturbed import Disturbed
from terminal import CTRL_C, Terminal, processes
from texts import pico_recipe, save_recipe, write_texts

from infra.services.stopping import LINE

DOMAINS = ("letters", "numbers")
LEAVE_SECONDS = 10


@pytest.fixture
def project(tmp_path):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    return Disturbed(tmp_path, save_recipe(tmp_path / "recipe.yaml", values), own_server=True)


def stopped(
    project: Disturbed,
    stop: Callable[[Terminal], str],
    *arguments: str,
    phase: str,
    at: str,
) -> tuple[int, str]:
    """Stop ``python -m ARGUMENTS`` when it comes to a phase; its exit code and last words.

    One Ray is started, and nothing is left running.
    """
    before = sessions()
    environment = project.environment(UPCYCLE_TEST_HOLDS=f"{phase}={at}")
    with Terminal("-m", *arguments, environment=environment) as command:
        command.wait_for(lambda: project.held(phase) is not None)
        words = re.sub(r"\x1b\[[\d;]*m", "", stop(command))
        code = command.process.returncode
    assert len(sessions() - before) <= 1
    deadline = time.monotonic() + LEAVE_SECONDS
    while (left := processes("UPCYCLE_HOME", str(project.home))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    return code, words


def sessions() -> set[Path]:
    """The folders of all Rays that were started."""
    folders = Path(os.environ["RAY_TMPDIR"], "ray").glob("session_*")
    return {folder for folder in folders if not folder.is_symlink()}


def press(command: Terminal) -> str:
    """Ctrl-C; what is shown after it."""
    return command.press(CTRL_C).partition("^C")[2]


def terminate(command: Terminal) -> str:
    return command.send(signal.SIGTERM)


def test_ctrl_c_ends_a_flow_that_trains_with_one_line(project):
    flow = ("flows.dume", str(project.recipe))
    code, words = stopped(project, press, *flow, phase="seed", at="training:5")
    assert (code, words.strip()) == (130, LINE)


@pytest.mark.faults
def test_a_flow_that_is_stopped_again_and_again_goes_on(project):
    flow = ("flows.dume", str(project.recipe))
    code, words = stopped(project, terminate, *flow, phase="term", at="training:5")
    assert code == 143
    assert "Traceback" not in words
    stage = ("tasks", "seed", "--workspace", str(project.workspace))
    code, words = stopped(project, press, *stage, phase="stage", at="training:5")
    assert (code, words.strip()) == (130, LINE)
    code, _ = stopped(project, Terminal.hang_up, *flow, phase="hangup", at="statistics:1")
    assert code == 129
    # The main thread, between stages.
    code, words = stopped(project, press, *flow, phase="main", at="create_model_version")
    assert (code, words.strip()) == (130, LINE)
    project.calls()
    assert "models:/" in project.flow().stdout
    assert "train" not in project.calls()
