"""MLflow's database: made once, whole, and named where it does not answer."""

import multiprocessing
import os
import signal
import sqlite3
import traceback

import pytest
from sqlalchemy import text

from infra import settings
from infra.tracking.runs import Tracker, open_database
from upcycle_core.errors import InputError


def _open(place, barrier):
    barrier.wait()
    open_database(place)


@pytest.mark.faults
def test_processes_that_create_the_database_at_once_do_not_break_it(tmp_path):
    place = settings.read({"UPCYCLE_HOME": str(tmp_path)})
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_open, args=(place, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        assert database.execute("select count(*) from alembic_version").fetchone() == (1,)


def _killed_when_it_is_migrated(place):
    import mlflow.store.db.utils as utils

    def half(engine):
        with engine.begin() as connection:  # as far as a kill among the migrations lets it come
            connection.execute(text("CREATE TABLE _alembic_tmp_runs (run_uuid VARCHAR(32))"))
        os.kill(os.getpid(), signal.SIGKILL)

    utils._upgrade_db = half
    open_database(place)


@pytest.mark.faults
def test_a_database_whose_making_was_killed_is_made_anew(tmp_path):
    place = settings.read({"UPCYCLE_HOME": str(tmp_path)})
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_killed_when_it_is_migrated, args=(place,))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    open_database(place)
    assert sorted(path.name for path in (tmp_path / "mlflow").glob("mlflow.db*")) == ["mlflow.db"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "odd://me:s3/cret@host/x"])
def test_a_database_that_does_not_answer_is_named_without_its_password(
    tmp_path, monkeypatch, address
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    place = settings.read({"UPCYCLE_HOME": str(tmp_path), "MLFLOW_TRACKING_URI": address})
    with pytest.raises(InputError, match=r"MLFLOW_TRACKING_URI = .*cannot be opened") as caught:
        Tracker(place, "test")
    assert "cret" not in "".join(traceback.format_exception(caught.value))
