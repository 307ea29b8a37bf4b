"""What Prefect records, and a terminal shows, of bad input that is found while a flow runs."""

import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_server import prefect_server

from flows.running.command_line import command
from infra.services.stopping import run_command

ROOT = Path(__file__).resolve().parents[3]
FLOW = """
from infra import settings
settings.configure()
from pathlib import Path
from prefect import flow, task
from infra.recipe.schema import Recipe
from tasks.recipes import load_recipe
from flows.running.refused import in_a_line
from upcycle_core.errors import Fault, InputError

def stage(item):
    raise InputError(Fault("domains.law", item, "is empty; give it text"))

@flow(name="refusing")
@in_a_line
def refusing(recipe: Recipe, item: str):
    return task(in_a_line(stage)).submit(item).result()

try:
    refusing(load_recipe(Path("recipes/demo.yaml")), "here")
except InputError as error:
    print("told:", error)
"""


def test_a_run_that_finds_bad_input_fails_in_a_line_each():
    begun = date.today()
    environment = {**os.environ, "PREFECT_API_URL": prefect_server(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FLOW], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    fault = "domains.law = 'here': is empty; give it text"
    assert f"told: {fault}" in said
    assert len(re.findall(rf"Finished in state Failed\(.{fault}", said)) == 2
    assert "Traceback" not in said
    server = {PREFECT_API_URL: environment["PREFECT_API_URL"]}
    with temporary_settings(server), get_client(sync_client=True) as client:
        ours = FlowFilter(name=FlowFilterName(any_=["refusing"]))
        [run] = client.read_flow_runs(flow_filter=ours)
    assert "demo" in run.tags
    # It may have been midnight meanwhile.
    assert run.name in {f"demo {day.isoformat()}: failed" for day in (begun, date.today())}


def lost(arguments):
    request = httpx.Request("POST", "http://me:secret@127.0.0.1:4200/api/flow_runs/filter")
    raise httpx.ConnectError("Connection refused", request=request)


def lost_at_once(arguments):
    """As Prefect's client says it of its first request."""
    try:
        lost(arguments)
    except httpx.ConnectError as error:
        raise RuntimeError("Failed to reach API at http://127.0.0.1:4200/api/") from error


@pytest.mark.parametrize("asking", [lost, lost_at_once])
def test_a_server_that_is_lost_is_named_in_a_line(capsys, asking):
    assert command(asking)([]) == 2
    [line] = capsys.readouterr().err.splitlines()
    address = "server = 'http://127.0.0.1:4200': does not answer any more (Connection refused); "
    assert line.startswith(address)
    assert "run the same command again" in line


def test_another_error_is_none_of_a_lost_server():
    @command
    def failing(arguments):
        try:
            lost(arguments)
        except httpx.ConnectError as error:
            raise RuntimeError("of another kind") from error

    with pytest.raises(RuntimeError, match="another kind"):
        failing([])


def test_what_a_command_within_a_command_says_stands_alone(capfd):
    inner = "import sys; print('why', file=sys.stderr); sys.exit(2)"

    @command
    def outer(arguments):
        run_command([sys.executable, "-c", inner], directory=ROOT)

    assert outer([]) == 2
    assert capfd.readouterr().err == "why\n"
