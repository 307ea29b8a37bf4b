"""Bars in Prefect's UI."""

import json
import urllib.request

import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_server import prefect_server

from flows.running.progress import ProgressArtifacts


@flow(name="bars")
def bars(*, ends: bool):
    """Shows two bars, one of them twice."""
    shown = ProgressArtifacts("bars")
    for label, share in (("seed", 10.0), ("experts law", 50.0), ("seed", 100.0)):
        shown(label, share, "on its way")
    if ends:
        shown.clear()
    return flow_run.id


def artifacts_of(run_id):
    body = json.dumps({"flow_runs": {"id": {"any_": [str(run_id)]}}}).encode()
    request = urllib.request.Request(
        f"{prefect_server()}/artifacts/filter", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {found["key"]: found["data"] for found in json.load(answer)}


@pytest.mark.faults
def test_bars_stay_where_a_flow_breaks_and_go_when_it_is_done():
    with temporary_settings({PREFECT_API_URL: prefect_server()}):
        broken, done = bars(ends=False), bars(ends=True)
    assert artifacts_of(broken) == {"bars-seed": 100.0, "bars-experts-law": 50.0}
    assert artifacts_of(done) == {}
