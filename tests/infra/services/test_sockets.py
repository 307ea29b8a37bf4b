"""Where a whole flow listens: its Ray, its Prefect server, and what they start."""

import ipaddress
import subprocess
import sys
import time

import psutil
import pytest
from project import ROOT, TIMEOUT, Project
from texts import TRAINING, pico_recipe, save_recipe, write_texts

from infra.services.processes import stop

DOMAINS = ("letters", "numbers")


def listening(process):
    """``(program, address)`` of every socket on which a process below ``process`` listens."""
    found = set()
    for member in [process, *process.children(recursive=True)]:
        try:
            sockets = member.net_connections(kind="tcp")
            title = " ".join(member.cmdline())
        except psutil.Error:  # it has ended
            continue
        found |= {
            (title, socket.laddr.ip) for socket in sockets if socket.status == psutil.CONN_LISTEN
        }
    return found


def is_loopback(address):
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.mark.faults
def test_all_that_a_flow_starts_listens_on_loopback_alone(tmp_path):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    # Two workers that meet for a training, beside what every flow starts.
    training = {**TRAINING, "steps": 8, "learning_rate": 1e-3, "gradient_accumulation": 2}
    values["baselines"] = {"full": {"method": "full-finetune", "training": training}}
    values["compute"] = {"cpus": 2, "baselines": {"workers": 2}}
    recipe = save_recipe(tmp_path / "recipe.yaml", values)
    project = Project(tmp_path, recipe, module="flows.compare", own_server=True)
    seen = set()
    flow = subprocess.Popen(
        [sys.executable, "-m", project.module, str(recipe)],
        cwd=ROOT,
        env=project.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        process, deadline = psutil.Process(flow.pid), time.monotonic() + 2 * TIMEOUT
        while flow.poll() is None:
            assert time.monotonic() < deadline
            seen |= listening(process)
            time.sleep(1.0)  # looking takes time from the flow
    finally:
        if flow.poll() is None:
            stop(psutil.Process(flow.pid), grace=20)
    output = flow.communicate()[0]
    assert flow.returncode == 0, output[-4000:]
    for part in ("prefect.server.api.server", "gcs_server", "raylet", "RayTrainWorker"):
        assert any(part in title for title, _ in seen), part
    assert not {(title, address) for title, address in seen if not is_loopback(address)}
