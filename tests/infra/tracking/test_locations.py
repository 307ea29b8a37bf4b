"""Where files lie: through a real server, in a home that was moved, in databases of before."""

import dataclasses
import shutil
import sqlite3

import pytest
from elsewhere import home_with_port, mlflow_server_of
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service import utils

from infra import settings
from infra.recipe.schema import KeepConfig
from infra.tracking.locations import local_folder
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.renaming import rename_folders
from infra.tracking.retention import Records
from infra.tracking.runs import Tracker, open_database
from upcycle_core.errors import InputError

COLUMNS = {
    "experiments": ["artifact_location"],
    "runs": ["artifact_uri"],
    "logged_models": ["artifact_location"],
    "model_versions": ["source", "storage_location"],
}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A home whose database has its tables, which take seconds to make."""
    place = settings.read({"UPCYCLE_HOME": str(tmp_path_factory.mktemp("empty") / "home")})
    open_database(place)
    return place.home


def copy_of(empty, home):
    shutil.copytree(empty, home)
    return settings.read({"UPCYCLE_HOME": str(home)})


@pytest.fixture(scope="module")
def home(empty, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "home"
    copy_of(empty, folder)
    return home_with_port(folder)


@pytest.fixture(scope="module")
def remote(home, tmp_path_factory):
    """Another machine's settings: a home of its own, and the server's address."""
    Tracker(home, "direct")
    with mlflow_server_of(home) as address:
        place = {
            "UPCYCLE_HOME": str(tmp_path_factory.mktemp("other")),
            "MLFLOW_TRACKING_URI": address,
        }
        yield settings.read(place)


def register(place, experiment, checkpoint, **more):
    """A run with a file and a version."""
    tracker, registry = Tracker(place, experiment), Registry(place)
    with tracker.start_run("flow", **more) as run:
        run.log_text("hello", "note.txt")
        registration = Registration(
            files={"dvc.lock": "schema: '2.0'"}, tags={"upcycle.recipe": "r"}
        )
        return run, registry.register(experiment, checkpoint, registration, run=run)


def files_below(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def stored(home):
    """Every place of files that the database names."""
    with sqlite3.connect(home.home / "mlflow" / "mlflow.db") as database:
        return [
            place
            for table, columns in COLUMNS.items()
            for column in columns
            for (place,) in database.execute(f"SELECT {column} FROM {table}")
        ]


def test_a_server_takes_files_and_gives_them_back(home, remote, checkpoint, tmp_path):
    run, version = register(remote, "sent", checkpoint)
    assert not list(remote.mlflow_artifacts.rglob("*"))
    registry = Registry(remote)
    assert registry.place(version.reference) is None
    out = registry.download(version.reference, tmp_path / "out")
    for file in checkpoint.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert registry.text(version, "dvc.lock") == "schema: '2.0'"
    # Who works on the database finds what came through the server.
    here = Registry(home).place(version.reference)
    assert here.is_relative_to(home.mlflow_artifacts)
    assert (here / "model.safetensors").read_bytes() == (
        checkpoint / "model.safetensors"
    ).read_bytes()
    [note] = Records(home, "sent").run_files(run.id)
    assert note.read_text() == "hello"


def test_deleting_through_a_server_takes_these_files_and_no_others(home, remote, checkpoint):
    _, kept = register(remote, "tidied", checkpoint)
    gone_run, gone = register(remote, "tidied", checkpoint)
    before = files_below(home.mlflow_artifacts)
    records = Records(remote, "tidied")
    mine = [Registry(home).place(gone.reference), *Records(home, "tidied").run_files(gone_run.id)]
    assert records.delete_version(gone)
    records.delete_run(gone_run.id)
    after = files_below(home.mlflow_artifacts)
    lost = {home.mlflow_artifacts / name for name in before.keys() - after.keys()}
    assert mine[1] in lost
    assert mine[0] / "model.safetensors" in lost
    assert all(file == mine[1] or file.is_relative_to(mine[0]) for file in lost)
    assert after == {name: before[name] for name in after}
    assert Registry(remote).text(kept, "dvc.lock") == "schema: '2.0'"


def test_what_cannot_be_sent_leaves_nothing_on_the_server(home, remote, checkpoint, tmp_path):
    before = files_below(home.mlflow_artifacts)
    (checkpoint / "zz.safetensors").symlink_to(tmp_path / "nothing")
    tracker, registry = Tracker(remote, "sent"), Registry(remote)
    with pytest.raises(OSError, match="zz"), tracker.start_run("flow") as run:
        registry.register("half", checkpoint, Registration(), run=run)
    assert registry.versions("half") == []
    assert files_below(home.mlflow_artifacts) == before


def test_the_home_of_a_server_reads_its_files_where_they_lie(home, remote, checkpoint):
    _, version = register(remote, "own", checkpoint)
    address = remote.mlflow_tracking_uri
    own = dataclasses.replace(home, mlflow_tracking_uri=address, mlflow_url=address)
    assert Registry(own).place(version.reference) == Registry(home).place(version.reference)


def test_a_location_that_leads_out_of_the_folder_is_no_folder(home):
    inside = local_folder("mlflow-artifacts:/a/b/artifacts", home)
    assert inside == home.mlflow_artifacts / "a" / "b" / "artifacts"
    for location in ("mlflow-artifacts:/../secret", "mlflow-artifacts://host/a", "s3://bucket/a"):
        assert local_folder(location, home) is None
    client = MlflowClient(home.mlflow_tracking_uri)
    Tracker(home, "any")
    experiment = client.create_experiment("out", artifact_location="mlflow-artifacts:/../out")
    run = client.create_run(experiment)
    with pytest.raises(MlflowException, match="Invalid path"):
        client.log_text(run.info.run_id, "x", "x.txt")


def test_a_moved_home_finds_its_files_and_its_killed_runs(empty, tmp_path, checkpoint):
    place = copy_of(empty, tmp_path / "before")
    run, version = register(place, "moving", checkpoint, workspace=place.home / "pico")
    MlflowClient(place.mlflow_tracking_uri).update_run(run.id, "RUNNING")  # as a kill leaves it
    place.home.rename(tmp_path / "after")
    utils._artifact_repos_cache.clear()  # MLflow's, which a process has but once
    moved = settings.read({"UPCYCLE_HOME": str(tmp_path / "after")})
    assert not [where for where in stored(moved) if str(tmp_path) in where]
    registry = Registry(moved)
    assert registry.text(version, "dvc.lock") == "schema: '2.0'"
    assert registry.place(version.reference).is_relative_to(moved.home)
    assert Tracker(moved, "moving").close_interrupted(moved.home / "pico") == [run.id]
    assert not (tmp_path / "before").exists()


def test_two_homes_with_one_database_are_told_apart(empty, tmp_path):
    shutil.copy(empty / "mlflow" / "mlflow.db", tmp_path / "shared.db")
    database = f"sqlite:///{tmp_path / 'shared.db'}"
    first, second = (
        settings.read({"UPCYCLE_HOME": str(tmp_path / name), "MLFLOW_TRACKING_URI": database})
        for name in ("first", "second")
    )
    Tracker(first, "flows")
    Tracker(second, "theirs")
    with pytest.raises(InputError, match=r"flows.*another home uses it"):
        Tracker(second, "flows")
    first.home.rename(tmp_path / "third")
    Tracker(dataclasses.replace(first, **moved_to(tmp_path / "third")), "flows")


def moved_to(home):
    return {"home": home, "mlflow_artifacts": home / "mlflow" / "artifacts"}


@pytest.fixture
def earlier(empty, tmp_path, checkpoint):
    """A home whose database names folders, as earlier versions wrote it, and its version."""
    place = copy_of(empty, tmp_path / "earlier")
    for name in ("ours", "theirs"):
        register(place, name, checkpoint)
    own, theirs = place.mlflow_artifacts / "ours", tmp_path / "theirs"
    (place.mlflow_artifacts / "theirs").rename(theirs)
    with sqlite3.connect(place.home / "mlflow" / "mlflow.db") as database:
        for table, columns in COLUMNS.items():
            for column in columns:
                for name, folder in {"ours": own, "theirs": theirs}.items():
                    change = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"
                    database.execute(change, (f"mlflow-artifacts:/{name}", folder.as_uri()))
        database.execute("DELETE FROM experiment_tags")
    return place


@pytest.mark.parametrize("moves", [False, True])
def test_a_database_of_before_is_named_anew(earlier, tmp_path, moves):
    foreign = sum(str(tmp_path / "theirs") in where for where in stored(earlier))
    assert sum(str(earlier.home) in where for where in stored(earlier)) == foreign == 4
    if moves:
        shutil.copytree(earlier.home, tmp_path / "copy")  # the old one is still there
        earlier = settings.read({"UPCYCLE_HOME": str(tmp_path / "copy")})
    else:
        here = Registry(earlier).place("models:/ours/1")  # nothing needs to be renamed to be read
        assert here.is_relative_to(earlier.mlflow_artifacts)
    assert rename_folders(earlier) == ["ours"]
    assert not [where for where in stored(earlier) if str(tmp_path / "earlier") in where]
    assert sum(str(tmp_path / "theirs") in where for where in stored(earlier)) == foreign
    registry = Registry(earlier)
    assert registry.place("models:/ours/1").is_relative_to(earlier.home)
    assert registry.place("models:/theirs/1").is_relative_to(tmp_path / "theirs")
    assert rename_folders(earlier) == []


def test_retention_works_on_a_database_of_before(earlier, checkpoint):
    keep = KeepConfig(versions=1, runs=1)
    for _ in range(2):
        register(earlier, "ours", checkpoint)
    records = Records(earlier, "ours")
    past = records.past(keep, ["ours"], recipe="demo", ways_back=lambda versions: set())
    assert [version.number for version in past.versions] == [1, 2]
    folders = [Registry(earlier).place(v.reference) for v in past.versions]
    for version in past.versions:
        assert records.delete_version(version)
    assert not [folder for folder in folders if folder.exists()]
    assert Registry(earlier).place("models:/ours/3").exists()
    assert Registry(earlier).place("models:/theirs/1").exists()
