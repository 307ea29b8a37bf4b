"""Champions in a row, and the way back."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from mlflow import MlflowClient

from infra.settings import read
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.data.licences import CARD
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from tasks.release.versions import (
    BESIDE_TAG,
    DECISION_TAG,
    EXPERTS_TAG,
    MODEL_TAG,
    OUTCOME_TAG,
    PENDING_TAG,
    PREVIOUS_TAG,
    ROLLED_BACK_TAG,
    Outcome,
    expert_digests,
    led_experts,
    offered,
    roll_back,
    ways_back,
    with_aliases,
    withdrawn_experts,
)
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
            marks = {PENDING_TAG: "champion" if promoted else "challenger"}
            made = registry.register(NAME, folder, Registration(tags=tags, marks=marks), run=run)
            with_aliases(registry, made)
    return registry


def champion(registry):
    return registry.find(NAME, "champion").number


def test_an_expert_that_led_is_told_from_one_that_did_not(history, session):
    own = expert_digests(session)
    led = {"python": {own["python"]}, "cpp": {own["cpp"], "third"}}
    assert led_experts(history, NAME) == led
    assert led_experts(history, "nobody") is None


def test_a_champion_that_a_person_made_has_a_way_back(tmp_path, session):
    """To the newest that was champion; tidying leaves it."""
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    registry, folder = Registry(settings), session.workspace.path("experts/python")
    with Tracker(settings, "test").start_run("test", workspace=tmp_path) as run:
        for mark in ("champion", "challenger", "champion", "challenger"):
            made = Registration(marks={PENDING_TAG: mark})
            with_aliases(registry, registry.register(NAME, folder, made, run=run))
    [second] = [version for version in registry.versions(NAME) if version.number == 2]
    registry.set_alias(second, "champion")
    assert 3 in ways_back(registry.versions(NAME))
    left, now = roll_back(registry, NAME, "it was worse")
    assert (left.number, now.number) == (2, 3)


def test_an_expert_is_taken_back_with_the_only_champion_that_had_it(tmp_path, session):
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    registry, folder = Registry(settings), session.workspace.path("experts/python")
    experts = {"python": "old", "cpp": "same"}
    with Tracker(settings, "test").start_run("test", workspace=tmp_path) as run:
        for python in ("old", "new"):
            tags = {EXPERTS_TAG: json.dumps({**experts, "python": python})}
            made = Registration(tags=tags, marks={PENDING_TAG: "champion"})
            with_aliases(registry, registry.register(NAME, folder, made, run=run))
    held = {"python": ["renamed", "new and more"], "cpp": ["same"]}
    assert withdrawn_experts(registry, NAME, held) == {}
    roll_back(registry, NAME, "it was worse")
    assert withdrawn_experts(registry, NAME, held) == {"python": 2}
    assert withdrawn_experts(registry, NAME, {d: [name] for d, name in experts.items()}) == {}
    known = {**held, "python": ["new", "old"]}  # as it was called in the champion of before
    assert withdrawn_experts(registry, NAME, known) == {}
    [first, _] = registry.versions(NAME)
    registry.remove_tag(first, EXPERTS_TAG)
    assert withdrawn_experts(registry, NAME, held) == {}


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


def test_a_champion_that_a_kill_left_half_promoted_stays_rolled_back(tmp_path, session):
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    registry, folder = Registry(settings), session.workspace.path("experts/python")
    made = Registration(tags={}, marks={PENDING_TAG: "champion"})
    with Tracker(settings, "test").start_run("test", workspace=tmp_path) as run:
        with_aliases(registry, registry.register(NAME, folder, made, run=run))
        tags = {MODEL_TAG: "second"}
        second = registry.register(NAME, folder, replace(made, tags=tags), run=run)
    registry.set_tags(second, {PREVIOUS_TAG: "1"})
    registry.set_alias(second, "champion")  # the next call would have removed the mark
    roll_back(registry, NAME, "it was worse")
    assert offered(registry, NAME, {"second"}) is not None
    assert champion(registry) == 1


@pytest.mark.parametrize("beside", ["2", "none"])
def test_who_was_judged_beside_another_champion_is_none(tmp_path, session, beside):
    """A rollback while a night scores and certifies; another recipe that registers there."""
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    registry, folder = Registry(settings), session.workspace.path("experts/python")
    reason, card = "91.00 > 90.00", "Gate: 91.00 > 90.00."
    tags = {OUTCOME_TAG: "promoted: 91.00", DECISION_TAG: reason, MODEL_TAG: "third"}
    third = Registration(
        tags={**tags, BESIDE_TAG: beside},
        marks={PENDING_TAG: "champion"},
        files={CARD: card},
        description=f"promoted: 91.00. A model.\n\nGate: {reason}.\n",
    )
    made = Registration(marks={PENDING_TAG: "champion"})
    with Tracker(settings, "test").start_run("test", workspace=tmp_path) as run:
        for _ in range(2):
            with_aliases(registry, registry.register(NAME, folder, made, run=run))
        waiting = registry.register(NAME, folder, third, run=run)
    if beside == "2":
        roll_back(registry, NAME, "it was worse")
    now = champion(registry)
    for found in (with_aliases(registry, waiting), offered(registry, NAME, {"third"}).version):
        assert champion(registry) == now == (1 if beside == "2" else 2)
        assert PENDING_TAG not in found.tags
        assert found.tags[OUTCOME_TAG] == "refused: the champion changed meanwhile"
        than = "version 2" if beside == "2" else "none"
        why = f"{reason}; version {now} is champion now, and it was judged when {than} was"
        assert found.tags[DECISION_TAG].startswith(why)
        assert registry.text(found, CARD).startswith(f"Gate: {why}")
        assert registry.description(found).startswith("refused: the champion changed meanwhile. A")


def test_experts_of_a_version_that_was_rolled_back_do_not_count(history):
    """Those of a champion that a person made do."""
    [first] = [version for version in history.versions(NAME) if version.number == 1]
    history.set_tags(first, {ROLLED_BACK_TAG: "it too"})
    [second] = [version for version in history.versions(NAME) if version.number == 2]
    history.set_alias(second, "champion")
    assert led_experts(history, NAME)["cpp"] == {"refused"}


def test_a_model_without_champion_has_no_way_back(registry):
    for name in ("nobody", "o'brien", "x' or name = 'y"):
        with pytest.raises(InputError, match="is no registered model with a champion"):
            roll_back(registry, name, "why")


def test_a_champion_before_whose_files_are_lost_is_not_made_champion(tmp_path, session):
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    registry, folder = Registry(settings), session.workspace.path("experts/python")
    made = Registration(marks={PENDING_TAG: "champion"})
    with Tracker(settings, "test").start_run("test", workspace=tmp_path) as run:
        first, _ = [
            with_aliases(registry, registry.register(NAME, folder, made, run=run)) for _ in range(2)
        ]
    MlflowClient(settings.mlflow_tracking_uri).delete_logged_model(first.model_id)
    with pytest.raises(InputError, match=f"version 1 of {NAME} has lost its files in MLflow"):
        roll_back(registry, NAME, "why")
    assert registry.pointed(NAME, "champion") == 2


def test_a_model_that_is_registered_already_says_so_and_not_what_the_gate_said(tmp_path, session):
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    registry, folder = Registry(settings), session.workspace.path("experts/python")
    made = Registration(tags={MODEL_TAG: "first", DECISION_TAG: "there was no champion"})
    with Tracker(settings, "test").start_run("test", workspace=tmp_path) as run:
        version = registry.register(NAME, folder, made, run=run)
    known = offered(registry, NAME, {"first"})
    assert known.verdict == "as it was registered: version 1 is this very model"
    assert Outcome(version, True, known.decision).verdict == "there was no champion"
    registry.set_tags(version, {OUTCOME_TAG: "refused: 89.00 < 90.00"})
    known = offered(registry, NAME, {"first"})
    assert "this very model, refused: 89.00 < 90.00; set the alias" in known.verdict
    registry.set_alias(version, "champion")
    assert offered(registry, NAME, {"first"}).verdict.endswith("this very model")


class Killed(BaseException):
    """Ends a registration as SIGKILL would, between two calls of the registry."""


@pytest.mark.parametrize("calls", range(5))
def test_a_registration_killed_between_its_steps_is_finished_by_the_next(
    tmp_path, session, monkeypatch, calls
):
    """Version 2 is to be champion after version 1, whichever call was the last one made."""
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    registry = Registry(settings)
    folder = session.workspace.path("experts/python")

    def offer(digest):
        found = offered(registry, NAME, digest)
        if found is not None:
            return found.version
        made = Registration(tags={MODEL_TAG: digest}, marks={PENDING_TAG: "champion"})
        with Tracker(settings, "test").start_run("test", workspace=tmp_path) as run:
            return with_aliases(registry, registry.register(NAME, folder, made, run=run))

    offer("first")
    left = iter(range(calls))

    def stopped(name, method):
        def call(*arguments):
            if next(left, None) is None:
                raise Killed(name)
            return method(*arguments)

        return call

    with monkeypatch.context() as patched:
        for name in ("set_alias", "set_tags", "remove_tag"):
            patched.setattr(registry, name, stopped(name, getattr(registry, name)))
        with suppress(Killed):
            offer("second")
        if calls < 4:
            [second] = registry.versions(NAME)[1:]
            assert PENDING_TAG in second.tags
    done = offer("second")
    assert (done.number, set(done.aliases)) == (2, {"champion", "challenger"})
    assert done.tags[PREVIOUS_TAG] == "1"
    assert PENDING_TAG not in done.tags
    assert len(registry.versions(NAME)) == 2
