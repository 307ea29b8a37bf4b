"""Who a new model is judged against."""

import pytest

from infra.settings import read
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from tasks.release.champion import standing_champion
from tasks.release.versions import MODEL_TAG


@pytest.fixture
def session(tmp_path):
    workspace = Workspace(tmp_path / "demo")
    out = workspace.stage("model")
    (out / "config.json").write_text("{}")
    workspace.publish(out, "model", {"fingerprint": "x"})
    return Session(load_recipe(CODE / "recipes" / "demo.yaml"), workspace, log=lambda text: None)


@pytest.fixture
def registry(tmp_path):
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
