"""Calls near the storage, on a Ray that is taken for a cluster: results, bad input, the end."""

import os
import sys
import time
from contextlib import nullcontext
from threading import Timer

import psutil
import pytest
import ray
from project import ROOT

from infra.cluster import calls
from infra.cluster.answers import loss_named
from infra.cluster.calls import heeding, made_there, near, run_program
from infra.cluster.compute import cluster
from infra.settings import read
from upcycle_core.checkpoints import known
from upcycle_core.checkpoints.known import SMALLEST, KnownFiles
from upcycle_core.errors import Fault, InputError


def process():
    return os.getpid()


def refuse():
    raise InputError(Fault("field", "value", "do this"))


def wait_for(file):
    file.write_text(str(os.getpid()))
    command = [sys.executable, "-c", "import time; time.sleep(600)", str(file)]
    run_program(command, folder=file.parent, environment=os.environ)


@pytest.fixture(scope="module")
def ray_elsewhere():
    """Its processes can import this file, and are none of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with cluster(read(os.environ), 1, ROOT):
            yield


def test_calls_are_made_there_on_a_cluster_and_here_without_one(ray_elsewhere):
    assert near(process) == os.getpid()
    with made_there():
        assert near(process) != os.getpid()
        with pytest.raises(InputError, match="field = 'value': do this"):
            near(refuse)
    assert near(process) == os.getpid()


def test_a_file_is_read_there_and_known_here(ray_elsewhere, tmp_path, monkeypatch):
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"w" * SMALLEST)
    small.write_bytes(b"w")
    plain = KnownFiles(None)
    there = KnownFiles(tmp_path / "known.sqlite", near=near)
    reads = []
    here = known._sha256
    monkeypatch.setattr(known, "_sha256", lambda opened: reads.append(opened.name) or here(opened))
    with made_there():
        found = {file: there.sha256(file, own=True) for file in (large, small)}
    assert reads == [str(small)]
    assert there.sha256(large) == found[large]  # remembered: no cluster is asked any more
    assert reads == [str(small)]
    assert found == {file: plain.sha256(file) for file in (large, small)}


def test_a_call_that_is_given_up_ends_with_what_it_started(ray_elsewhere, tmp_path):
    file = tmp_path / "started"

    def children():
        running = psutil.process_iter(["cmdline"])
        return [child for child in running if str(file) in (child.info["cmdline"] or [])]

    with made_there():
        timer = Timer(0, lambda: [wait_until(children), calls.end()])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            near(wait_for, file)
        timer.join()
    assert int(file.read_text()) != os.getpid()
    wait_until(lambda: not children())


@pytest.mark.parametrize("where", [nullcontext, made_there])
def test_a_check_ends_what_a_call_started(ray_elsewhere, tmp_path, where):
    """Wherever it runs: a program that hangs would keep its flow for ever."""
    file = tmp_path / "started"

    def children():
        running = psutil.process_iter(["cmdline"])
        return [child for child in running if str(file) in (child.info["cmdline"] or [])]

    def late():
        if children():
            refuse()

    with where(), heeding(late), pytest.raises(InputError, match="field = 'value': do this"):
        near(wait_for, file)
    wait_until(lambda: not children())
    assert near(process) == os.getpid()


def wait_until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_client_s_lost_connection_is_ray_s_end_and_a_task_s_own_is_not():
    said = r"is gone .*GRPC connection failed.*same command again"
    with pytest.raises(InputError, match=said), loss_named():
        raise ConnectionError("GRPC connection failed")
    own = ray.exceptions.RayTaskError("piece", "the hub is away", ConnectionError("away"))
    with pytest.raises(ConnectionError, match="the hub is away"), loss_named():
        raise own.as_instanceof_cause()
