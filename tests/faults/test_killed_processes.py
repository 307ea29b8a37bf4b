"""Every process of a flow killed by SIGKILL in every phase, and the same command again."""

from collections import Counter

import psutil
import pytest
from disturbed import HOLDS, Disturbed, kill, kill_flow, kill_prefect, kill_worker
from killed_servers import mlflow_server, prefect_server
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from infra.settings import read
from infra.tracking.registry import Registry

DOMAINS = ("letters", "numbers")
# Calls that a kill may cost: what ran just then, a piece on each of the two CPUs.
REPEATED = {"train": 2, "domain_statistics": 2, "assemble": 1}

SAID_SECONDS = 40  # some seconds where nothing else runs

PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}

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


@pytest.fixture
def servers(tmp_path):
    """MLflow's and Prefect's, not started."""
    found = mlflow_server(tmp_path / "mlflow"), prefect_server(tmp_path / "prefect")
    yield found
    for server in found:
        server.kill()


@pytest.mark.parametrize("process", ["flow", "worker", "own prefect", "prefect", "mlflow"])
def test_kills_in_every_phase_end_with_the_same_bytes(undisturbed, servers, tmp_path, process):
    texts, digests, calls = undisturbed
    recipe = save_recipe(tmp_path / "recipe.yaml", values_of(texts))
    project = Disturbed(tmp_path, recipe, own_server=process != "prefect")
    mlflow, prefect = servers
    disturb, before = {
        "flow": (kill_flow, nothing),
        "worker": (kill_worker, nothing),
        "own prefect": (kill_prefect, nothing),
        "prefect": (prefect.replace, prefect.start),
        "mlflow": (mlflow.kill, mlflow.start),
    }[process]
    project.more = {
        "mlflow": {"MLFLOW_TRACKING_URI": mlflow.url, **PATIENCE},
        "prefect": {"PREFECT_API_URL": f"{prefect.url}/api"},
    }.get(process, {})
    starts = project.run_through(dict.fromkeys(HOLDS, disturb), before)
    # No worker is left when aliases are set; a flow goes on without the server it brought along.
    missed = {"worker": {"promotion"}, "own prefect": {*HOLDS} - {"experts"}}
    hit = {phase for phase, killed in project.killed.items() if killed}
    assert hit >= {*HOLDS} - missed.get(process, set()), project.killed
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


def nothing():
    pass


@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_lost_ray_is_said_within_seconds_and_the_same_command_goes_on(
    undisturbed, tmp_path, server
):
    texts, digests, _ = undisturbed
    project = Disturbed(tmp_path, save_recipe(tmp_path / "recipe.yaml", values_of(texts)))
    flow = project.start("experts")
    assert project.wait_for(flow, "experts"), project.said()
    [lost] = [p for p in psutil.Process(flow.pid).children() if p.name() == server]
    assert kill(lost.pid)
    assert flow.wait(SAID_SECONDS) == 2, project.said()
    [line] = [line for line in project.said().splitlines() if line.startswith("compute = 'Ray'")]
    assert "run the same command again" in line
    project.let_go("experts")
    project.flow()
    assert project.digests() == digests


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
