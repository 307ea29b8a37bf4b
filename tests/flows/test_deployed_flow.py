"""The real flow, started on the server and run by the worker's own process."""

import sys

import pytest
import yaml
from prefect_server import free_port
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from infra.deployments import PREFECT_FILE, deploy
from infra.registry import Registry
from infra.settings import read

DOMAINS = ("letters", "numbers")

# What the worker runs is tested in tests/infra/test_services.py on a small flow.
pytestmark = pytest.mark.faults


class Served(Project):
    """A project with servers on free ports."""

    ports: dict[str, str]

    def environment(self, **more):
        return super().environment(**self.ports, PREFECT_WORKER_QUERY_SECONDS="1", **more)


@pytest.fixture
def served(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    project = Served(tmp_path, save_recipe(tmp_path / "recipe.yaml", values), own_server=True)
    project.ports = {
        "UPCYCLE_PREFECT_PORT": str(free_port()),
        "UPCYCLE_MLFLOW_PORT": str(free_port()),
    }
    try:
        project.run(sys.executable, "-m", "infra.services", "up")
        yield project
    finally:
        project.run(sys.executable, "-m", "infra.services", "down")


def test_deployed_run_reaches_the_registry(served, tmp_path):
    settings = read(served.environment())
    deployments = yaml.safe_load(PREFECT_FILE.read_text())
    for deployment in deployments["deployments"]:
        deployment["parameters"]["recipe"] = str(served.recipe)
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump(deployments))
    assert deploy(settings, prefect_file=file) == [
        "dume/demo",
        "dume/nightly",
        "compare/comparison",
        "evaluate/tasks",
        "symphony/strangers",
        "ders/deltas",
        "simoe/instructions",
    ]
    done = served.run(
        "env",
        f"PREFECT_API_URL={settings.prefect_api_url}",
        "prefect",
        "deployment",
        "run",
        "dume/demo",
        "--watch",
    )
    assert "Completed" in done.stdout + done.stderr
    version = Registry(settings).find("upcycle-pico", "champion")
    assert version is not None
    assert (served.workspace / "model" / "config.json").exists()
