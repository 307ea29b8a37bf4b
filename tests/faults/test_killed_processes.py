"""Every process of a flow killed by SIGKILL in every phase, and the same command again."""

import subprocess
import sys
import time
import urllib.request
from collections import Counter

import pytest
from disturbed import HOLDS, Disturbed, below, kill, kill_flow, kill_prefect, kill_worker
from prefect_server import free_port
from project import TIMEOUT, Project
from texts import pico_recipe, save_recipe, write_texts

from infra.registry import Registry
from infra.settings import read

DOMAINS = ("letters", "numbers")
# Calls that a kill may cost: what ran just then, a piece on each of the two CPUs.
REPEATED = {"train": 2, "domain_statistics": 2, "assemble": 1}

pytestmark = pytest.mark.faults


def values_of(texts):
    values = pico_recipe(texts, domains=DOMAINS)
    values["experts"]["training"]["steps"] = 25
    values["statistics"]["shards"] = 3
    values["compute"]["cpus"] = 2
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    return values


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Texts, and what a run that nothing disturbed made and called."""
    folder = tmp_path_factory.mktemp("undisturbed")
    texts = write_texts(folder / "texts", domains=DOMAINS)
    project = Project(folder, save_recipe(folder / "recipe.yaml", values_of(texts)))
    project.flow()
    return texts, project.digests(), project.calls()


class MlflowServer:
    """MLflow's server over a folder, started again where it was killed."""

    def __init__(self, folder):
        self.folder, self.port, self.process = folder, free_port(), None
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        """Start it, unless it runs, and wait until it answers."""
        if self.process is None or self.process.poll() is not None:
            with (self.folder / "mlflow.log").open("ab") as log:
                self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        deadline = time.monotonic() + TIMEOUT
        while not self.answers():
            assert self.process.poll() is None, (self.folder / "mlflow.log").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def command(self):
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        database = ["--backend-store-uri", f"sqlite:///{self.folder / 'served.db'}"]
        files = ["--artifacts-destination", str(self.folder / "served"), "--serve-artifacts"]
        return [sys.executable, "-m", "mlflow", "server", *place, *database, *files]

    def answers(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def kill(self, *_):
        """End it with the processes that answer for it."""
        if self.process.poll() is not None:
            return 0
        family = below(self.process.pid)
        self.process.kill()
        self.process.wait()
        return 1 + sum(map(kill, family))


@pytest.fixture
def mlflow_server(tmp_path):
    server = MlflowServer(tmp_path)
    yield server
    if server.process is not None:
        server.kill()


@pytest.mark.parametrize("process", ["flow", "worker", "prefect", "mlflow"])
def test_kills_in_every_phase_end_with_the_same_bytes(
    undisturbed, mlflow_server, tmp_path, process
):
    texts, digests, calls = undisturbed
    recipe = save_recipe(tmp_path / "recipe.yaml", values_of(texts))
    project = Disturbed(tmp_path, recipe, own_server=True)
    disturb = {
        "flow": kill_flow,
        "worker": kill_worker,
        "prefect": kill_prefect,
        "mlflow": mlflow_server.kill,
    }[process]
    before = mlflow_server.start if process == "mlflow" else lambda: None
    if process == "mlflow":
        patience = {
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        }
        project.more = {"MLFLOW_TRACKING_URI": mlflow_server.url, **patience}
    starts = project.run_through(dict.fromkeys(HOLDS, disturb), before)
    assert all(project.killed[phase] for phase in HOLDS), project.killed
    wanted = {"flow": len(HOLDS) + 1, "worker": 1}  # Ray runs a piece again by itself
    assert starts == wanted.get(process, starts)
    assert project.digests() == digests
    made = project.calls()
    assert made - calls <= Counter(REPEATED), made - calls
    assert not calls - made
    before()
    registry = Registry(read(project.environment()))
    [version] = registry.versions("upcycle-pico")
    assert set(version.aliases) == {"challenger", "champion"}


def test_killed_expert_leaves_a_whole_checkpoint_to_continue_from(undisturbed, tmp_path):
    """That a training continues there bit for bit is tested beside the trainer."""
    texts, _, _ = undisturbed
    project = Disturbed(tmp_path, save_recipe(tmp_path / "recipe.yaml", values_of(texts)))
    flow = project.start("experts")
    assert project.wait_for(flow, "experts"), project.said()
    kill_flow(flow, 0)
    [*checkpoints] = (project.workspace / ".pieces").glob("*/whole.checkpoints/checkpoint-20")
    assert checkpoints
    assert all((checkpoint / "complete.json").exists() for checkpoint in checkpoints)


def symphony_of(texts):
    values = values_of(texts)
    values["domains"]["letters"]["origin"] = {"mixture": {"letters": 3, "numbers": 1}}
    values["domains"]["numbers"]["origin"] = {"initialisation": 5, "vocabulary_size": 300}
    values["symphony"] = {
        "segmentation": "letters",
        "alignment": {"residual": "procrustes"},
        "calibration": {"tokens": 400, "sequence_length": 32, "batch_size": 4},
    }
    values["moe"] = {"top_k": 2}
    return values


@pytest.mark.parametrize("pause", ["activations:100", "merging:5"], ids=["pairs", "starts"])
def test_killed_symphony_ends_with_the_same_bytes(tmp_path, pause):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    projects = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        recipe = save_recipe(folder / "recipe.yaml", symphony_of(texts))
        projects[name] = Project(folder, recipe, module="flows.symphony")
    projects["killed"].kill_flow(pause)
    assert not (projects["killed"].workspace / "model").exists()
    trained = projects["killed"].calls()["train"]
    projects["killed"].flow()
    projects["whole"].flow()
    assert projects["killed"].digests() == projects["whole"].digests()
    assert (trained, projects["killed"].calls()["train"]) == (2, 0)
