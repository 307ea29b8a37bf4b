"""The real flow, started on the server and run by the worker's own process."""

import pytest
from served import served_project

from infra.services.deployments import deploy
from infra.tracking.registry import Registry

# What the worker runs is tested in tests/infra/services/test_services.py on a small flow.
pytestmark = pytest.mark.faults


@pytest.fixture
def served(tmp_path):
    with served_project(tmp_path) as project:
        yield project


def test_deployed_run_reaches_the_registry(served):
    settings = served.settings
    assert deploy(settings, recipe=served.recipe) == [
        "dume/pico",
        "retrain/pico-every-night",
        "grow/pico",
        "shrink/pico",
        "rollback/pico",
        "restore/pico",
        "tidy/pico",
    ]
    done = served.run(
        "env",
        f"PREFECT_API_URL={settings.prefect_api_url}",
        "prefect",
        "deployment",
        "run",
        "dume/pico",
        "--watch",
    )
    assert "Completed" in done.stdout + done.stderr
    version = Registry(settings).find("upcycle-pico", "champion")
    assert version is not None
    assert (served.workspace / "model" / "config.json").exists()
