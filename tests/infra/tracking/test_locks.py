"""A lock that is waited for in words."""

import time
from threading import Thread

from infra.tracking import locks
from infra.tracking.locks import locked


def test_a_wait_that_is_more_than_a_moment_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "TRY_SECONDS", 0.01)
    monkeypatch.setattr(locks, "SILENT_SECONDS", 0.1)
    file, turns = tmp_path / "lock", []

    def wait():
        with locked(file, "waiting for the first"):
            turns.append("second")

    second = Thread(target=wait)
    with locked(file, "waiting for nobody"):
        second.start()
        time.sleep(0.05)
        assert caplog.messages == []
        second.join(1)
        turns.append("first")
    second.join(10)
    assert turns == ["first", "second"]
    assert caplog.messages == ["waiting for the first"]
