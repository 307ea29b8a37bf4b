"""The Prefect server that a flow brings along."""

import time
from threading import Thread

import pytest
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
