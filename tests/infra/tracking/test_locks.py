"""A lock that is waited for in words."""

import fcntl
import time
from contextlib import suppress
from threading import Thread

from databases import home_with_database

from infra.cluster.calls import heeding
from infra.tracking import locks
from infra.tracking.locks import locked
from infra.tracking.runs import open_database


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


def test_a_database_that_another_one_opens_is_waited_for_in_words_and_within_limits(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(locks, "TRY_SECONDS", 0.01)
    monkeypatch.setattr(locks, "SILENT_SECONDS", 0.1)
    settings = home_with_database(tmp_path / "home")
    caplog.clear()  # the database's tables were made

    def check():
        if caplog.messages:
            raise TimeoutError

    def wait():
        with suppress(TimeoutError):
            open_database(settings)

    waits = Thread(target=wait)
    with (settings.mlflow_artifacts.parent / "database.lock").open("w") as lock, heeding(check):
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits.start()
        waits.join(10)
        is_over = not waits.is_alive()
    waits.join()
    assert is_over
    assert caplog.messages == ["waiting for another command that opens MLflow's database"]
