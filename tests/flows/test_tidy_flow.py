"""``flows.tidy`` as a user runs it, and what Prefect keeps afterwards."""

import json
import os
import re
import time
from dataclasses import asdict
from uuid import UUID

import pytest
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running
from prefect_server import prefect_server
from texts import DOMAINS, pico_recipe, save_recipe

from flows.making.change import UNFINISHED, Change
from flows.tidy import main
from infra.durable import sealed
from tasks.engine.workspace import Workspace

HERE = DOMAINS[:2]
COPIES = [f"other-{number}-{number:012x}" for number in range(3)]
"""Of versions of another model, as a server that followed it has left them."""


@pytest.fixture(autouse=True)
def server():
    with temporary_settings({PREFECT_API_URL: prefect_server()}):
        yield


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("UPCYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    made = Workspace(tmp_path / "home" / "pico-tidy")
    for domain in DOMAINS:
        staged = made.stage(f"experts/{domain}")
        (staged / "weights").write_bytes(b"x" * 1000)
        made.publish(staged, f"experts/{domain}", {})
    staged = made.stage("model")
    (staged / "weights").write_bytes(b"x" * 1000)
    made.publish(
        staged, "model", {"inputs": {f"experts/{d}": made.digest(f"experts/{d}") for d in HERE}}
    )
    for number, copy in enumerate(COPIES):
        (made.models / "served" / copy).mkdir(parents=True)
        mark = made.models / "served" / f"{copy}.held"
        mark.touch()
        os.utime(mark, (number, number))
    return made


@pytest.fixture
def recipe(tmp_path):
    values = pico_recipe(tmp_path, name="pico-tidy", domains=HERE)
    return str(save_recipe(tmp_path / "r.yaml", {**values, "keep": {"flow_runs": 2}}))


def record(client, label, state, tags=(), **parameters):
    """A flow run, its artifact and its line of log, as Prefect keeps them."""
    flow_id = client.create_flow_from_name("dume")
    body = {"flow_id": str(flow_id), "name": label, "parameters": parameters}
    body["tags"] = list(tags)
    body["state"] = state.model_dump(mode="json", include={"type", "name"})
    run = UUID(client.request("POST", "/flow_runs/", json=body).json()["id"])
    client.create_artifact(ArtifactCreate(key=f"{label}-table", type="table", flow_run_id=run))
    line = {"name": "x", "level": 20, "message": "x", "timestamp": "2026-01-01T00:00:00Z"}
    client.request("POST", "/logs/", json=[{**line, "flow_run_id": str(run)}])
    return run


def names(client):
    runs = client.read_flow_runs(limit=200)
    return {run.name for run in runs if run.name.startswith("pico-tidy-")}


def has_logs(client, run):
    of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
    return bool(client.read_logs(log_filter=of_run))


def test_what_would_be_freed_is_shown_and_with_apply_it_goes(workspace, recipe, capsys):
    mine = {"recipe": {"name": "pico-tidy"}}
    with get_client(sync_client=True) as client:
        record(client, "pico-tidy-notice", Completed(), ["pico-tidy"], run="x", block="mail/x")
        record(client, "pico-tidy-somebody-else", Completed(), ["pico-tidy"])
        ended = [record(client, f"pico-tidy-{i}", Completed(), **mine) for i in range(4)]
        record(client, "pico-tidy-running", Running(), **mine)
        record(client, "pico-tidy-theirs", Completed(), recipe={"name": "other"})
        record(client, "pico-tidy-rollback", Completed(), name="upcycle-pico-tidy")
        before = names(client)

        assert main([recipe]) == 0
        shown = capsys.readouterr().out
        assert "experts/colours" in shown
        assert "copies of registered versions" in shown
        assert "--apply" in shown
        assert names(client) == before
        assert workspace.provenance("experts/colours") is not None
        served = workspace.models / "served"
        assert all((served / copy).is_dir() for copy in COPIES)
        assert Artifact.get("pico-tidy-tidy").description.startswith("What would be freed")

        assert main([recipe, "--apply"]) == 0
        assert "Freed." in capsys.readouterr().out
        assert not workspace.path("experts/colours").exists()
        assert sorted(path.name for path in served.iterdir() if path.is_dir()) == COPIES[1:]
        assert all(workspace.provenance(f"experts/{domain}") is not None for domain in HERE)
        # Two ended runs stay: the newest of those, and the one that showed the plan.
        stay = ("running", "theirs", "somebody-else", "rollback")
        assert names(client) == {f"pico-tidy-{name}" for name in stay}
        assert Artifact.get("pico-tidy-0-table") is None
        assert Artifact.get("pico-tidy-theirs-table") is not None
        deadline = time.monotonic() + 30
        while any(has_logs(client, run) for run in ended) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not any(has_logs(client, run) for run in ended)

    assert main([recipe, "--apply"]) == 0
    with get_client(sync_client=True) as client:
        ours = FlowFilter(name=FlowFilterName(any_=["tidy"]))
        [newest, *_] = client.read_flow_runs(
            flow_filter=ours, sort=FlowRunSort.EXPECTED_START_TIME_DESC
        )
    assert re.fullmatch(r"tidy of pico-tidy \S+: (.* freed|nothing to free)", newest.name)


def test_a_domain_whose_growing_was_killed_stays_whatever_an_older_recipe_says(
    workspace, recipe, capsys
):
    """Its expert may have been trained for hours; a deployment holds the recipe of before."""
    change = sealed(asdict(Change("grow colours", {})))
    (workspace.root / UNFINISHED).write_text(json.dumps(change))
    assert main([recipe, "--apply"]) == 0
    assert "experts/colours" not in capsys.readouterr().out
    assert workspace.provenance("experts/colours") is not None


def test_a_workspace_at_work_or_absent_is_said_in_one_line(workspace, recipe, capsys):
    with workspace.lock("another flow"):
        assert main([recipe, "--apply", "--set", "compute.wait_minutes=0"]) == 2
    assert "another flow" in capsys.readouterr().err
    assert main([recipe, "--set", "name=nowhere"]) == 2
    assert "no such workspace" in capsys.readouterr().err
    assert not workspace.root.with_name("nowhere").exists()
