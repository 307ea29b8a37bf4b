"""A flow that is stopped at its terminal while its own Ray and Prefect server are at work."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from disturbed import Disturbed
from prefect_server import with_tables
from terminal import CTRL_C, Terminal, processes, with_variable
from texts import pico_recipe, save_recipe, write_texts

from benchmarks.killed_recipes import RECIPES
from benchmarks.killed_recipes import write_texts as write_more
from infra.services.stopping import GRACE_SECONDS, LINE
from infra.settings import read
from infra.tracking.registry import Registry
from tasks.engine.workspace import Workspace

DOMAINS = ("letters", "numbers")
LEAVE_SECONDS = END_SECONDS = 30
"""Five at most on a machine that has nothing else to do; tests run three at once."""
READER = "infra/readers/ask/ask_transformers.py"
PHASES = {
    "start-up": "tasks.recipes/check",
    "ray": "ray._private.node/Node.start_ray_processes",
    "sources": ">sources",
    "documents": "upcycle_core.corpora.documents/write_documents",
    "corpora": ">corpora/letters",
    "seed": "training:5",
    # The seed has 20 steps, so only experts come to a 21st.
    "experts": "training:21",
    "statistics": "statistics:1",
    "router": "upcycle_core.dume.router/solve_routers",
    "model": "assembly:1",
    "report": ">report",
    "evaluation": "upcycle_core.evaluation.text.pieces/evaluate_moe",
    "commit": "dvc.commands.commit/CmdCommit.run",
    "push": "dvc.commands.data_sync/CmdDataPush.run",
    "registration": "create_model_version",
    "promotion": "set_registered_model_alias",
    "certificate": READER,
}
"""Where a build is stopped, in the order in which it comes there."""
CHANGES = {
    "retrain": ("experts", "training:5"),
    "shrink": ("solve", "upcycle_core.dume.router/solve_routers"),
    "rollback": ("alias", "set_registered_model_alias"),
    "restore": ("pull", "dvc.commands.data_sync/CmdDataPull.run"),
    "tidy": ("look", "tasks.living.retention/table"),
}

METHODS = {
    "symphony": {
        "training": "training:5",
        "united": ">united",
        "alignment": "upcycle_core.symphony.moments/collect_moments",
    },
    "simoe": {"instructions": ">instructions", "tuning": "upcycle_core.simoe.train/train_simoe"},
    "ders": {"storing": "upcycle_core.ders.compress/compress", "naming": "create_model_version"},
    "grow": {"expert": "training:5", "solve": "upcycle_core.dume.router/solve_routers"},
}
"""Where the flows of other methods, and one that adds a domain, are stopped."""


@pytest.fixture
def project(tmp_path):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    project = Disturbed(tmp_path, save_recipe(tmp_path / "recipe.yaml", values), own_server=True)
    with_tables(project.home / "prefect")
    return project


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
    holds = "" if at == READER else f"{phase}={at}"
    environment = project.environment(UPCYCLE_TEST_HOLDS=holds)
    with Terminal("-m", *arguments, environment=environment) as command:
        command.wait_for(lambda: is_there(project, phase, at))
        began = time.monotonic()
        words = re.sub(r"\x1b\[[\d;]*m", "", stop(command))
        took = time.monotonic() - began
        code = command.process.returncode
    print(f"{arguments[0]} {phase}: ended in {took:.1f} s")
    assert took < END_SECONDS
    if took < GRACE_SECONDS:  # what takes longer is killed, and cleared away by the next flow
        assert not list(project.workspace.glob(".staging/*"))
    assert len(sessions() - before) <= 1
    deadline = time.monotonic() + LEAVE_SECONDS
    while (left := processes("UPCYCLE_HOME", str(project.home))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    return code, words


def is_there(project: Disturbed, phase: str, at: str) -> bool:
    """Whether the command has come to a phase; a reader is a program that nothing of ours holds."""
    if at == READER:
        return any(READER in line for line in processes("UPCYCLE_HOME", str(project.home)))
    return project.held(phase) is not None


def sessions() -> set[Path]:
    """The folders of all Rays that were started."""
    folders = Path(os.environ["RAY_TMPDIR"], "ray").glob("session_*")
    return {folder for folder in folders if not folder.is_symlink()}


def press(command: Terminal) -> str:
    """Ctrl-C; what is shown after it."""
    return command.press(CTRL_C).partition("^C")[2]


def terminate(command: Terminal) -> str:
    return command.send(signal.SIGTERM)


def terminate_all(project: Disturbed, command: Terminal) -> str:
    """As systemd stops a service: the flow's own Prefect server is gone before it is told."""
    before = command.shown
    found = with_variable("UPCYCLE_HOME", str(project.home))
    for process in sorted(found, key=lambda process: process.pid == command.process.pid):
        with suppress(psutil.Error):
            process.terminate()
    return command.rest(before)


@pytest.mark.faults
def test_ctrl_c_ends_a_flow_that_trains_with_one_line(project):
    flow = ("flows.dume", str(project.recipe))
    code, words = stopped(project, press, *flow, phase="seed", at="training:5")
    assert (code, words.strip()) == (130, LINE)


@pytest.mark.faults
def test_a_flow_that_is_stopped_again_and_again_goes_on(project):
    flow = ("flows.dume", str(project.recipe))
    code, words = stopped(project, terminate, *flow, phase="term", at="training:5")
    assert (code, words.strip()) == (143, LINE)
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


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["seed", "registration"])
def test_a_service_that_is_stopped_with_all_its_processes_ends_with_one_line(project, phase):
    flow = ("flows.dume", str(project.recipe))
    stop = partial(terminate_all, project)
    code, words = stopped(project, stop, *flow, phase=phase, at=PHASES[phase])
    assert (code, words.strip()) == (143, LINE)


@pytest.fixture(scope="module")
def building(tmp_path_factory):
    """A project that is stopped at one phase after the other."""
    folder = tmp_path_factory.mktemp("building")
    texts = write_texts(folder / "texts")
    values = pico_recipe(texts)  # of three domains: one can leave
    values["experts"]["training"]["steps"] = 25
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    values["registry"] = {"certificate": "at-hand"}
    project = Disturbed(folder, save_recipe(folder / "recipe.yaml", values), own_server=True)
    project.texts = texts
    return project


@pytest.mark.faults
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_ends_a_build_in_every_phase(building, phase):
    flow = ("flows.dume", str(building.recipe))
    code, words = stopped(building, press, *flow, phase=phase, at=PHASES[phase])
    assert (code, words.strip()) == (130, LINE)


@pytest.mark.faults
def test_a_build_that_was_stopped_in_every_phase_goes_on(building, tmp_path):
    building.calls()
    done = building.flow()
    assert "models:/upcycle-pico/1" in done.stdout
    assert not building.calls()["train"]
    version = Registry(read(building.environment())).find("upcycle-pico", "champion")
    assert "arrived: " in version.tags["upcycle.certificate"]
    whole = Disturbed(tmp_path, building.recipe)
    whole.flow()
    assert building.digests() == whole.digests()


@pytest.mark.faults
def test_ctrl_c_ends_a_flow_that_waits(building):
    with (
        Workspace(building.workspace).lock("another flow"),
        Terminal(
            "-m", "flows.dume", str(building.recipe), environment=building.environment()
        ) as command,
    ):
        command.wait_for(lambda: "waiting for another flow" in command.shown)
        assert press(command).strip() == LINE
        assert command.process.returncode == 130
    assert not list((building.workspace / ".waiting").iterdir())


def arguments_of(building: Disturbed, flow: str, folder: Path) -> tuple[str, ...]:
    """What a flow that changes the model of ``building`` is called with."""
    recipe = str(building.recipe)
    return {
        "retrain": (recipe,),
        "shrink": (recipe, "numbers"),
        "rollback": ("upcycle-pico",),
        "restore": ("upcycle-pico", "1", "--into", str(folder)),
        "tidy": (recipe,),
    }[flow]


@pytest.mark.faults
@pytest.mark.parametrize("flow", CHANGES)
def test_ctrl_c_ends_every_flow_that_changes_a_model(building, flow, tmp_path):
    phase, at = CHANGES[flow]
    arguments = arguments_of(building, flow, tmp_path)
    train = building.texts / "letters" / "train.txt"
    train.write_text(f"{train.read_text()}\n<|doc|>\nalpha beta of a later day\n" * 2)
    own = f"{flow}-{phase}"  # a build has waited at experts as well, and what says so is there
    code, words = stopped(building, press, f"flows.{flow}", *arguments, phase=own, at=at)
    assert (code, words.strip()) == (130, LINE)
    done = building.run(sys.executable, "-m", f"flows.{flow}", *arguments, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.faults
@pytest.mark.parametrize("flow", ["restore", "tidy"])
def test_a_service_that_changes_a_model_ends_with_one_line(building, flow, tmp_path):
    phase, at = CHANGES[flow]
    arguments = (f"flows.{flow}", *arguments_of(building, flow, tmp_path))
    stop = partial(terminate_all, building)
    code, words = stopped(building, stop, *arguments, phase=f"service-{phase}", at=at)
    assert (code, words.strip()) == (143, LINE)


@pytest.mark.faults
@pytest.mark.parametrize("flow", METHODS)
def test_ctrl_c_ends_the_flows_of_every_method_and_they_go_on(flow, tmp_path):
    made = RECIPES[flow](write_more(tmp_path / "texts"))
    files = {name: save_recipe(tmp_path / f"{name}.yaml", v) for name, v in made.recipes.items()}
    project = Disturbed(tmp_path, files["recipe"], own_server=True)
    project.workspace = project.home / "kills"
    command, before = ([w.format(**files) for w in words] for words in (made.command, made.before))
    if before:
        project.run(sys.executable, "-m", *before)
    for phase, at in METHODS[flow].items():
        code, words = stopped(project, press, *command, phase=phase, at=at)
        assert (code, words.strip()) == (130, LINE), phase
    done = project.run(sys.executable, "-m", *command)
    assert "models:/upcycle-kills" in done.stdout
