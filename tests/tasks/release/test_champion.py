"""Who a new model is judged against."""

import shutil
from dataclasses import replace

import pytest
from databases import home_with_database

from infra.cluster.pieces import Piece
from infra.settings import read
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker, open_database
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from tasks.release import champion as module
from tasks.release.champion import Champion, changed_files, standing_champion
from tasks.release.versions import MODEL_TAG
from upcycle_core.errors import InputError


@pytest.fixture
def session(tmp_path):
    workspace = Workspace(tmp_path / "demo")
    out = workspace.stage("model")
    (out / "config.json").write_text("{}")
    workspace.publish(out, "model", {"fingerprint": "x"})
    return Session(load_recipe(CODE / "recipes" / "demo.yaml"), workspace, log=lambda text: None)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A home that has an id, for all tests to copy."""
    place = home_with_database(tmp_path_factory.mktemp("empty") / "home")
    open_database(place)
    return place.home


@pytest.fixture
def registry(empty, tmp_path):
    shutil.copytree(empty, tmp_path, dirs_exist_ok=True)
    return Registry(read({"UPCYCLE_HOME": str(tmp_path)}))


def register(tmp_path, registry, session, digest):
    tracker = Tracker(read({"UPCYCLE_HOME": str(tmp_path)}), "test")
    with tracker.start_run("test", workspace=tmp_path) as run:
        registration = Registration(
            params={}, metrics={}, tags={MODEL_TAG: digest}, files={}, description=""
        )
        version = registry.register(
            session.recipe.registered_name, session.workspace.path("model"), registration, run=run
        )
    registry.set_alias(version, "champion")


def test_at_first_there_is_none(session, registry):
    with standing_champion(session, registry) as champion:
        assert champion is None


@pytest.mark.parametrize("own", [True, False])
def test_it_knows_whether_it_is_the_same_model(tmp_path, session, registry, own):
    digest = session.workspace.digest("model") if own else "another"
    register(tmp_path, registry, session, digest)
    with standing_champion(session, registry) as champion:
        assert champion.is_own is own
        assert not champion.directory.exists()


def champion_files(registry):
    """Where the files of the champion lie in MLflow."""
    return registry.place("models:/upcycle-demo@champion")


def judge(session, registry):
    """Let a piece run on the champion's files; it is not to come so far."""
    with standing_champion(session, registry) as champion:
        champion.run(Piece.of("champion", pytest.fail), "mark")


DAMAGES = {
    "config.json: not as registered": lambda folder: (folder / "config.json").write_text("{} "),
    "weights: not as registered": lambda folder: (folder / "weights").unlink(),
    "provenance.json: not as": lambda folder: (folder / "provenance.json").write_text("{}"),
    "its files cannot be had": shutil.rmtree,
}


def test_files_that_are_not_as_registered_are_named_before_they_are_judged(
    tmp_path, session, registry
):
    out = session.workspace.stage("model")
    (out / "config.json").write_text("{}")
    (out / "weights").write_bytes(b"weights")
    session.workspace.publish(out, "model", {"fingerprint": "x"})
    digest = session.workspace.digest("model")
    register(tmp_path, registry, session, digest)
    files, whole = champion_files(registry), tmp_path / "whole"
    assert changed_files(files, digest) == []
    assert changed_files(files, "another") == ["provenance.json"]
    assert changed_files(tmp_path / "a version of others", None) == []
    shutil.copytree(files, whole)
    for said, damage in DAMAGES.items():
        damage(files)
        with pytest.raises(InputError, match=said) as raised:
            judge(session, registry)
        assert "flows.rollback upcycle-demo" in str(raised.value)
        assert "set the alias champion there to the version that it names" in str(raised.value)
        assert not (session.workspace.staging / "champion").exists()
        shutil.rmtree(files, ignore_errors=True)
        shutil.copytree(whole, files)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_one_that_is_none_any_more_when_it_is_to_be_scored_is_said_so(
    tmp_path, session, registry, is_deleted
):
    register(tmp_path, registry, session, "another")
    name = session.recipe.registered_name
    with standing_champion(session, registry) as champion:
        if is_deleted:
            registry._client.delete_model_version(name, "1")
        else:  # rolled back, and its files went with tidy
            shutil.rmtree(champion_files(registry))
            registry._client.delete_registered_model_alias(name, "champion")
        with pytest.raises(InputError, match=r"is none any more; .* run the same command again"):
            champion.run(Piece.of("champion", pytest.fail), "mark")
    assert not champion.directory.exists()
    assert len(registry.versions(name)) == (0 if is_deleted else 1)
    with standing_champion(session, registry) as found:
        assert found is None


def test_the_same_number_of_another_registered_model_is_another_champion(
    tmp_path, session, registry, monkeypatch
):
    places = []

    def run_pieces(pieces, *, directory, **options):
        places.append(directory)
        return dict.fromkeys([piece.name for piece in pieces])

    monkeypatch.setattr(module, "run_pieces", run_pieces)
    monkeypatch.setattr(Champion, "_fetch", lambda self: None)
    for name in ("first", "second", "first"):
        of_name = replace(session.recipe.registry, model=name)
        own = Session(replace(session.recipe, registry=of_name), session.workspace, log=print)
        if registry.find(name, "champion") is None:
            register(tmp_path, registry, own, "digest")
        with standing_champion(own, registry) as champion:
            assert champion.version.number == 1
            champion.run(Piece.of("champion", pytest.fail), "mark")
    assert places[0] == places[2] != places[1]
