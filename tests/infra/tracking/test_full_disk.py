"""A disk on which the databases, too, find no room: the error of the disk is what is seen."""

import errno

import pytest
from databases import home_with_database
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from infra.tracking import registry as module
from infra.tracking.locations import local_folder
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker

FULL = OSError(errno.ENOSPC, "No space left on device")


def no_room(*_, **__):
    raise MlflowException("(sqlite3.OperationalError) database or disk is full")


@pytest.fixture
def place(tmp_path):
    return home_with_database(tmp_path / "home")


def test_what_ended_a_run_is_said_though_its_end_cannot_be(place, monkeypatch):
    tracker = Tracker(place, "flows")
    monkeypatch.setattr(MlflowClient, "set_terminated", no_room)
    with pytest.raises(OSError, match="No space left"), tracker.start_run("broken"):
        raise FULL


def test_what_was_copied_of_a_model_goes_first(place, tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "mixtral"}')
    (checkpoint / "model.safetensors").write_bytes(bytes(1000))
    copied = []

    def copy_and_fail(registry, model_id, directory, *_):
        model = registry._client.get_logged_model(model_id)
        folder = local_folder(model.artifact_location, place)
        module.place_files(directory, folder)
        copied.extend(folder.rglob("*.safetensors"))
        raise FULL

    monkeypatch.setattr(Registry, "_copy_files", copy_and_fail)
    monkeypatch.setattr(MlflowClient, "finalize_logged_model", no_room)
    with (
        Tracker(place, "flows").start_run("register") as run,
        pytest.raises(OSError, match="No space left"),
    ):
        Registry(place).register("pico", checkpoint, Registration(), run=run)
    assert copied
    assert not any(file.exists() for file in copied)
