"""What Prefect records, and a terminal shows, of bad input that is found while a flow runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

from prefect_server import prefect_server

ROOT = Path(__file__).resolve().parents[3]
FLOW = """
from infra import settings
settings.configure()
from prefect import flow, task
from flows.running.refused import in_a_line
from upcycle_core.errors import Fault, InputError

def stage(item):
    raise InputError(Fault("domains.law", item, "is empty; give it text"))

@flow(name="refusing")
@in_a_line
def refusing(item: str):
    return task(in_a_line(stage)).submit(item).result()

try:
    refusing("here")
except InputError as error:
    print("told:", error)
"""


def test_a_run_that_finds_bad_input_fails_in_a_line_each():
    environment = {**os.environ, "PREFECT_API_URL": prefect_server(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FLOW], env=environment, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    fault = "domains.law = 'here': is empty; give it text"
    assert f"told: {fault}" in said
    assert len(re.findall(rf"Finished in state Failed\(.{fault}", said)) == 2
    assert "Traceback" not in said
