"""When nights are, on a real server."""

import dataclasses
import os

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect_server import prefect_server

from infra import settings
from infra.services.deployments import PREFECT_FILE, deploy
from infra.services.pools import LOCAL


@pytest.fixture
def place(tmp_path):
    own = settings.read({**os.environ, "UPCYCLE_HOME": str(tmp_path)})
    return dataclasses.replace(own, prefect_api_url=prefect_server())


@pytest.mark.faults
def test_another_time_replaces_the_one_before_on_the_server(place, tmp_path):
    """A night that was moved must not be run twice."""
    content = yaml.safe_load(PREFECT_FILE.read_text())
    night = [each for each in content["deployments"] if "night" in each["tags"]]
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({**content, "deployments": night}))
    with SyncPrefectClient(place.prefect_api_url) as client:
        client.create_work_pool(WorkPoolCreate(name=LOCAL, type="process"), overwrite=True)
        for told, expected in (
            ({"timezone": "Asia/Tokyo"}, ("0 3 * * *", "Asia/Tokyo")),
            ({"schedule": "30 1 * * 1-5"}, ("30 1 * * 1-5", "Asia/Tokyo")),
            ({}, ("30 1 * * 1-5", "Asia/Tokyo")),
        ):
            [name] = deploy(place, prefect_file=file, changes=["name=moved"], **told)
            deployment = client.read_deployment_by_name(name)
            [own] = deployment.schedules
            assert own.active
            assert (own.schedule.cron, own.schedule.timezone) == expected
    assert "30 1 * * 1-5 as cron has it (Asia/Tokyo)" in deployment.description
