"""The Prefect server that a flow brings along."""

import subprocess
import sys
import time
from threading import Thread

import pytest
from prefect import get_client
from prefect.server.api.server import SubprocessASGIServer

from flows.running.own_server import start_server
from upcycle_core.errors import InputError


@pytest.fixture
def server():
    own = SubprocessASGIServer()
    yield own
    own.stop()


def test_one_that_is_killed_while_it_starts_is_said_at_once(server):
    def kill():
        while server.server_process is None:
            time.sleep(0.01)
        server.server_process.kill()

    killing = Thread(target=kill)
    killing.start()
    with pytest.raises(InputError) as raised:
        start_server()
    killing.join()
    assert f"server = '{server.address}'" in str(raised.value)
    assert "ended (-9) before it answered; run the same command again" in str(raised.value)


@pytest.mark.faults
def test_one_that_is_lost_is_there_again_at_the_same_address(server):
    start_server()
    address, lost = server.address, server.server_process
    with get_client(sync_client=True) as client:
        client.hello()
        lost.kill()
        assert client.hello().status_code == 200  # a client that knows it asks again
    assert server.address == address
    assert server.server_process.pid != lost.pid
    with open(f"/proc/{server.server_process.pid}/status") as status:
        [blocked] = [line.split()[1] for line in status if line.startswith("SigBlk")]
    assert int(blocked, 16) & 0b11 == 0b11  # SIGHUP and SIGINT: Ctrl-C and a closed terminal


def test_one_that_is_stopped_as_it_starts_leaves_no_process(server, monkeypatch):
    started, stopped = [], []
    run, join = server._run_uvicorn_command, Thread.join

    def slowly():
        time.sleep(0.3)
        started.append(run())
        return started[-1]

    def stop(thread, timeout=None):
        if not stopped:
            stopped.append(thread)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(server, "_run_uvicorn_command", slowly)
    monkeypatch.setattr(Thread, "join", stop)
    with pytest.raises(KeyboardInterrupt):
        start_server()
    [process] = started
    assert process.poll() is not None


def test_one_that_cannot_begin_is_not_started_for_ever(server, monkeypatch):
    def run():
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2); exit(3)"])

    monkeypatch.setattr(server, "_run_uvicorn_command", run)
    with pytest.raises(InputError, match=r"cannot start \(3 tries\) before it answered"):
        start_server()
