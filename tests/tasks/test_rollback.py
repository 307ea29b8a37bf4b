"""Champions in a row, and the way back."""

import json

import pytest

from infra.reading import load_recipe
from infra.records import Registration
from infra.registry import Registry
from infra.settings import read
from infra.tracking import Tracker
from tasks.register import (
    EXPERTS_TAG,
    ROLLED_BACK_TAG,
    expert_digests,
    led_experts,
    roll_back,
    with_alias,
)
from tasks.stage import CODE, Session
from tasks.workspace import Workspace
from upcycle_core.errors import InputError

NAME = "upcycle-demo"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def registry(home):
    return Registry(read({"UPCYCLE_HOME": str(home)}))


@pytest.fixture(scope="module")
def session(home):
    workspace = Workspace(home / "demo")
    for domain in ("python", "cpp"):
        out = workspace.stage(f"experts/{domain}")
        (out / "config.json").write_text(json.dumps(domain))
        workspace.publish(out, f"experts/{domain}", {"fingerprint": domain})
    return Session(load_recipe(CODE / "recipes" / "demo.yaml"), workspace, log=print)


@pytest.fixture(scope="module")
def history(home, registry, session):
    """Version 1 was champion, 2 refused, 3 is champion; 3 has another expert of cpp."""
    tracker = Tracker(read({"UPCYCLE_HOME": str(home)}), "test")
    own = expert_digests(session)
    folder = session.workspace.path("experts/python")
    with tracker.start_run("test", workspace=home) as run:
        for promoted, cpp in ((True, own["cpp"]), (False, "refused"), (True, "third")):
            tags = {EXPERTS_TAG: json.dumps({**own, "cpp": cpp})}
            made = registry.register(NAME, folder, Registration(tags=tags), run=run)
            with_alias(registry, made, promoted)
    return registry


def champion(registry):
    return registry.find(NAME, "champion").number


def test_an_expert_that_led_is_told_from_one_that_did_not(history, session):
    assert led_experts(session, history) == {"python", "cpp"}


def test_the_way_back_is_that_of_the_champions(history, session):
    """Over version 2, which never was one; the next step finds nobody."""
    assert champion(history) == 3
    left, now = roll_back(history, NAME, "it was worse")
    assert (left.number, now.number) == (3, 1)
    assert champion(history) == 1
    [third] = [version for version in history.versions(NAME) if version.number == 3]
    assert third.tags[ROLLED_BACK_TAG] == "it was worse"
    with pytest.raises(InputError, match="no champion before it"):
        roll_back(history, NAME, "again")
    assert champion(history) == 1


def test_experts_of_a_version_that_was_rolled_back_do_not_count(history, session):
    [first] = [version for version in history.versions(NAME) if version.number == 1]
    history.set_tags(first, {ROLLED_BACK_TAG: "it too"})
    assert led_experts(session, history) == set()


def test_a_model_without_champion_has_no_way_back(registry):
    with pytest.raises(InputError, match="is no registered model with a champion"):
        roll_back(registry, "nobody", "why")
