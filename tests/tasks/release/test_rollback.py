"""Champions in a row, and the way back."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Thread

import pytest
from databases import home_with_database
from mlflow import MlflowClient

from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.data.licences import CARD
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from tasks.release import history as module
from tasks.release.history import (
    EXPERTS_TAG,
    FORMER_TAG,
    PENDING_TAG,
    PREVIOUS_TAG,
    REVOKED_TAG,
    ROLLED_BACK_TAG,
    WITHDRAWN_TAG,
    former_champion,
    led_experts,
    remember,
    roll_back,
    ways_back,
    withdrawn_experts,
)
from tasks.release.versions import (
    BESIDE_TAG,
    DECISION_TAG,
    MODEL_TAG,
    OUTCOME_TAG,
    Outcome,
    expert_digests,
    offered,
    with_aliases,
)
from upcycle_core.errors import InputError

NAME = "upcycle-demo"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def settings(home):
    return home_with_database(home)


@pytest.fixture(scope="module")
def registry(settings):
    return Registry(settings)


@pytest.fixture(scope="module")
def session(home):
    workspace = Workspace(home / "demo")
    for domain in ("python", "cpp"):
        out = workspace.stage(f"experts/{domain}")
        (out / "config.json").write_text(json.dumps(domain))
        workspace.publish(out, f"experts/{domain}", {"fingerprint": domain})
    return Session(load_recipe(CODE / "recipes" / "demo.yaml"), workspace, log=print)


@pytest.fixture(scope="module")
def register_as(home, settings, registry, session):
    """Registers a version of a model, in a run of its own."""
    tracker, folder = Tracker(settings, "test"), session.workspace.path("experts/python")

    def register(name, made):
        with tracker.start_run("test", workspace=home) as run:
            return registry.register(name, folder, made, run=run)

    return register


@pytest.fixture
def name(request):
    """A model of the test's own: a registry of its own takes seconds to make."""
    return request.node.name


@pytest.fixture
def register(register_as, name):
    return partial(register_as, name)


@pytest.fixture(scope="module")
def history(registry, register_as, session):
    """Version 1 was champion, 2 refused, 3 is champion; 3 has another expert of cpp."""
    own = expert_digests(session)
    for promoted, cpp in ((True, own["cpp"]), (False, "refused"), (True, "third")):
        tags = {EXPERTS_TAG: json.dumps({**own, "cpp": cpp})}
        marks = {PENDING_TAG: "champion" if promoted else "challenger"}
        with_aliases(registry, register_as(NAME, Registration(tags=tags, marks=marks)))
    return registry


def champion(registry, name=NAME):
    return registry.find(name, "champion").number


def test_an_expert_that_led_is_told_from_one_that_did_not(history, session):
    own = expert_digests(session)
    led = {"python": {own["python"]}, "cpp": {own["cpp"], "third"}}
    assert led_experts(history, NAME, recipe="demo") == led
    assert led_experts(history, "nobody", recipe="demo") is None


def test_experts_of_another_recipe_with_the_same_registered_name_lead_no_expert_of_this_one(
    registry, name, register
):
    """Its nights would want the champion's expert, which was never in its workspace."""
    for recipe, mark in (("demo", "champion"), ("demo-large", "challenger")):
        tags = {EXPERTS_TAG: json.dumps({"python": recipe})}
        made = Registration(params={"name": recipe}, tags=tags, marks={PENDING_TAG: mark})
        with_aliases(registry, register(made))
    assert led_experts(registry, name, recipe="demo") == {"python": {"demo"}}
    assert led_experts(registry, name, recipe="demo-large") == {}
    assert led_experts(registry, name, recipe="demo-small") is None


def test_a_champion_that_a_person_made_has_a_way_back(registry, name, register):
    """To the newest that was champion; tidying leaves it."""
    for mark in ("champion", "challenger", "champion", "challenger"):
        made = Registration(marks={PENDING_TAG: mark})
        with_aliases(registry, register(made))
    [second] = [version for version in registry.versions(name) if version.number == 2]
    registry.set_alias(second, "champion")
    assert 3 in ways_back(registry.versions(name))
    left, now = roll_back(registry, name, "it was worse")
    assert (left.number, now.number) == (2, 3)


def test_an_expert_is_taken_back_with_the_only_champion_that_had_it(registry, name, register):
    experts = {"python": "old", "cpp": "same"}
    for python in ("old", "new"):
        tags = {EXPERTS_TAG: json.dumps({**experts, "python": python})}
        made = Registration(tags=tags, marks={PENDING_TAG: "champion"})
        with_aliases(registry, register(made))
    held = {"python": ["renamed", "new and more"], "cpp": ["same"]}
    assert withdrawn_experts(registry, name, held) == {}
    roll_back(registry, name, "it was worse")
    assert withdrawn_experts(registry, name, held) == {"python": 2}
    assert withdrawn_experts(registry, name, {d: [name] for d, name in experts.items()}) == {}
    known = {**held, "python": ["new", "old"]}  # as it was called in the champion of before
    assert withdrawn_experts(registry, name, known) == {}
    [first, _] = registry.versions(name)
    registry.remove_tag(first, EXPERTS_TAG)
    assert withdrawn_experts(registry, name, held) == {"python": 2}  # it was known by then


def test_where_the_champion_before_does_not_say_what_was_in_it_no_expert_is_withdrawn(
    registry, name, register
):
    for tags in ({}, {EXPERTS_TAG: '{"python": "new"}'}):
        made = Registration(tags=tags, marks={PENDING_TAG: "champion"})
        with_aliases(registry, register(made))
    roll_back(registry, name, "it was worse")
    assert withdrawn_experts(registry, name, {"python": ["new"]}) == {}


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


def test_a_champion_that_a_kill_left_half_promoted_stays_rolled_back(registry, name, register):
    made = Registration(tags={}, marks={PENDING_TAG: "champion"})
    with_aliases(registry, register(made))
    tags = {MODEL_TAG: "second"}
    second = register(replace(made, tags=tags))
    registry.set_tags(second, {PREVIOUS_TAG: "1"})
    registry.set_alias(second, "champion")  # the next call would have removed the mark
    roll_back(registry, name, "it was worse")
    assert offered(registry, name, {"second"}, recipe="demo") is not None
    assert champion(registry, name) == 1


@pytest.mark.parametrize("beside", ["2", "none"])
def test_who_was_judged_beside_another_champion_is_none(registry, name, register, beside):
    """A rollback while a night scores and certifies; another recipe that registers there."""
    reason, card = "91.00 > 90.00", "Gate: 91.00 > 90.00."
    tags = {OUTCOME_TAG: "promoted: 91.00", DECISION_TAG: reason, MODEL_TAG: "third"}
    third = Registration(
        tags={**tags, BESIDE_TAG: beside},
        marks={PENDING_TAG: "champion"},
        files={CARD: card},
        description=f"promoted: 91.00. A model.\n\nGate: {reason}.\n",
    )
    made = Registration(marks={PENDING_TAG: "champion"})
    for _ in range(2):
        with_aliases(registry, register(made))
    waiting = register(third)
    if beside == "2":
        roll_back(registry, name, "it was worse")
    now = champion(registry, name)
    for found in (
        with_aliases(registry, waiting),
        offered(registry, name, {"third"}, recipe="demo").version,
    ):
        assert champion(registry, name) == now == (1 if beside == "2" else 2)
        assert PENDING_TAG not in found.tags
        assert found.tags[OUTCOME_TAG] == "refused: the champion changed meanwhile"
        than = "version 2" if beside == "2" else "none"
        why = f"{reason}; version {now} is champion now, and it was judged when {than} was"
        assert found.tags[DECISION_TAG].startswith(why)
        assert registry.text(found, CARD).startswith(f"Gate: {why}")
        assert registry.description(found).startswith("refused: the champion changed meanwhile. A")


def test_who_was_judged_beside_a_champion_that_was_deleted_meanwhile_is_none(
    settings, registry, name, register
):
    """As where it was deleted before: a person sets the alias."""
    made = Registration(marks={PENDING_TAG: "champion"})
    with_aliases(registry, register(made))
    waiting = register(replace(made, tags={OUTCOME_TAG: "promoted", BESIDE_TAG: "1"}))
    MlflowClient(settings.mlflow_tracking_uri).delete_model_version(name, "1")
    found = with_aliases(registry, waiting)
    assert registry.pointed(name, "champion") is None
    assert found.aliases == ("challenger",)
    assert PENDING_TAG not in found.tags
    assert found.tags[OUTCOME_TAG] == "refused: the champion changed meanwhile"
    why = "none is champion now, and it was judged when version 1 was; set the alias in MLflow"
    assert why in found.tags[DECISION_TAG]


def test_a_rollback_waits_for_a_promotion_at_work(settings, registry, name, register, monkeypatch):
    """Or the promotion would undo it: it has seen the champion before."""
    made = Registration(marks={PENDING_TAG: "champion"})
    for _ in range(2):
        with_aliases(registry, register(made))
    third = register(replace(made, tags={BESIDE_TAG: "2"}))
    back = Thread(target=roll_back, args=(Registry(settings), name, "it was worse"))
    set_tags = registry.set_tags

    def slow(version, tags):
        if PREVIOUS_TAG in tags:
            back.start()
            back.join(1)
        set_tags(version, tags)

    monkeypatch.setattr(registry, "set_tags", slow)
    assert "champion" in with_aliases(registry, third).aliases
    back.join()
    assert champion(registry, name) == 2
    left = [v.number for v in registry.versions(name) if ROLLED_BACK_TAG in v.tags]
    assert left == [3]


def test_a_promotion_that_waited_for_a_rollback_heeds_it(registry, name, register):
    """What was read of the version before does not count: two flows may finish a killed one's."""
    made = Registration(marks={PENDING_TAG: "champion"})
    with_aliases(registry, register(made))
    seen = register(made)
    with_aliases(registry, seen)
    roll_back(registry, name, "it was worse")
    with_aliases(registry, seen)
    assert champion(registry, name) == 1


def test_a_champion_that_another_home_moved_meanwhile_is_left_alone(
    registry, name, register, monkeypatch
):
    made = Registration(marks={PENDING_TAG: "champion"})
    first, _ = [with_aliases(registry, register(made)) for _ in range(2)]
    of_versions = module.champions

    def look(*arguments):
        seen = of_versions(*arguments)
        registry.set_alias(first, "champion")
        return seen

    monkeypatch.setattr(module, "champions", look)
    with pytest.raises(InputError, match="is champion no more since a moment ago"):
        roll_back(registry, name, "it was worse")
    assert not any(ROLLED_BACK_TAG in version.tags for version in registry.versions(name))


def test_experts_of_a_version_that_was_rolled_back_do_not_count(history):
    """Those of a champion that a person made do."""
    [first] = [version for version in history.versions(NAME) if version.number == 1]
    history.set_tags(first, {ROLLED_BACK_TAG: "it too"})
    [second] = [version for version in history.versions(NAME) if version.number == 2]
    history.set_alias(second, "champion")
    assert led_experts(history, NAME, recipe="demo")["cpp"] == {"refused"}


def test_a_model_without_champion_has_no_way_back(registry):
    for name in ("nobody", "o'brien", "x' or name = 'y"):
        with pytest.raises(InputError, match="is no registered model with a champion"):
            roll_back(registry, name, "why")


def test_a_version_that_was_promoted_from_another_model_has_that_one_s_numbers_in_its_tags(
    settings, registry, name, register
):
    """They say who was champion there."""
    for _ in range(3):
        with_aliases(registry, register(Registration(marks={PENDING_TAG: "champion"})))
    client = MlflowClient(settings.mlflow_tracking_uri)
    for number in (1, 2, 3):
        client.copy_model_version(f"models:/{name}/{number}", f"{name}-production")
    versions = registry.versions(f"{name}-production")
    registry.set_alias(versions[2], "champion")
    assert ways_back(registry.versions(f"{name}-production")) == set()
    with pytest.raises(InputError, match="has no champion before it"):
        roll_back(registry, f"{name}-production", "why")
    assert ways_back(registry.versions(name)) == {2}


def test_a_champion_before_whose_files_are_lost_is_not_made_champion(
    settings, registry, name, register
):
    made = Registration(marks={PENDING_TAG: "champion"})
    first, _ = [with_aliases(registry, register(made)) for _ in range(2)]
    MlflowClient(settings.mlflow_tracking_uri).delete_logged_model(first.model_id)
    with pytest.raises(InputError, match=f"version 1 of {name} has lost its files in MLflow"):
        roll_back(registry, name, "why")
    assert registry.pointed(name, "champion") == 2


def test_a_model_that_is_registered_already_says_so_and_not_what_the_gate_said(
    registry, name, register
):
    made = Registration(tags={MODEL_TAG: "first", DECISION_TAG: "there was no champion"})
    version = register(made)
    known = offered(registry, name, {"first"}, recipe="demo")
    assert known.verdict == "as it was registered: version 1 is this very model"
    assert Outcome(version, True, known.decision).verdict == "there was no champion"
    registry.set_tags(version, {OUTCOME_TAG: "refused: 89.00 < 90.00"})
    known = offered(registry, name, {"first"}, recipe="demo")
    assert "this very model, refused: 89.00 < 90.00; set the alias" in known.verdict
    registry.set_alias(version, "champion")
    assert offered(registry, name, {"first"}, recipe="demo").verdict.endswith("this very model")


class Killed(BaseException):
    """Ends a registration as SIGKILL would, between two calls of the registry."""


def test_a_first_one_that_was_killed_before_it_was_champion_is_no_former_champion(
    registry, name, register
):
    made = register(Registration(tags={MODEL_TAG: "first"}, marks={PENDING_TAG: "champion"}))
    registry.set_tags(made, {PREVIOUS_TAG: "none"})
    remember(registry, name, registry.versions(name))
    assert former_champion(registry, name) is None
    with_aliases(registry, registry.versions(name)[0])
    assert former_champion(registry, name) == "1"


@pytest.mark.parametrize("calls", range(6))
def test_a_registration_killed_between_its_steps_is_finished_by_the_next(
    registry, name, register, monkeypatch, calls
):
    """Version 2 is to be champion after version 1, whichever call was the last one made."""

    def offer(digest):
        found = offered(registry, name, {digest}, recipe="demo")
        if found is not None:
            return found.version
        made = Registration(tags={MODEL_TAG: digest}, marks={PENDING_TAG: "champion"})
        return with_aliases(registry, register(made))

    offer("first")
    left = iter(range(calls))

    def stopped(call, method):
        def stopping(*arguments):
            if next(left, None) is None:
                raise Killed(call)
            return method(*arguments)

        return stopping

    with monkeypatch.context() as patched:
        for call in ("set_alias", "set_tags", "set_model_tags", "remove_tag"):
            patched.setattr(registry, call, stopped(call, getattr(registry, call)))
        with suppress(Killed):
            offer("second")
        if calls < 5:
            [second] = registry.versions(name)[1:]
            assert PENDING_TAG in second.tags
    done = offer("second")
    assert (done.number, set(done.aliases)) == (2, {"champion", "challenger"})
    assert done.tags[PREVIOUS_TAG] == "1"
    assert registry.model_tags(name)[FORMER_TAG] == "2"
    assert PENDING_TAG not in done.tags
    assert len(registry.versions(name)) == 2


def test_who_a_kill_kept_from_being_champion_and_is_refused_then_has_never_led(
    registry, name, register
):
    """The call before the alias has named the champion before it already."""

    def made(python, **tags):
        experts = {EXPERTS_TAG: json.dumps({"python": python})}
        return register(Registration(tags=experts | tags, marks={PENDING_TAG: "champion"}))

    for python in ("first", "second"):
        with_aliases(registry, made(python))
    waiting = made("third", **{BESIDE_TAG: "2"})
    registry.set_tags(waiting, {PREVIOUS_TAG: "2"})
    assert led_experts(registry, name, recipe="demo") == {"python": {"first", "second"}}
    roll_back(registry, name, "it was worse")
    found = with_aliases(registry, waiting)
    assert found.tags[OUTCOME_TAG] == "refused: the champion changed meanwhile"
    assert not {PENDING_TAG, PREVIOUS_TAG} & found.tags.keys()
    assert led_experts(registry, name, recipe="demo") == {"python": {"first"}}


def test_a_rollback_of_a_named_version_that_is_repeated_takes_back_no_other(
    registry, name, register
):
    """Two people at once; a command whose end nobody has seen."""
    for _ in range(3):
        with_aliases(registry, register(Registration(marks={PENDING_TAG: "champion"})))
    for said in ("it was worse", "again"):
        left, now = roll_back(registry, name, said, only=3)
        assert (left.number, now.number) == (3, 2)
        assert champion(registry, name) == 2
    taken = {v.number: v.tags[ROLLED_BACK_TAG] for v in registry.versions(name) if is_taken(v)}
    assert taken == {3: "it was worse"}
    with pytest.raises(InputError, match="is champion by now, not version 1"):
        roll_back(registry, name, "why", only=1)


def is_taken(version):
    return ROLLED_BACK_TAG in version.tags


def test_a_champion_that_did_not_arrive_takes_no_expert_with_it(registry, name, register):
    """The reader may be at fault; the way back leads to another one all the same."""
    for python in ("old", "new", "refused"):
        tags = {EXPERTS_TAG: json.dumps({"python": python})}
        mark = "challenger" if python == "refused" else "champion"
        made = Registration(tags=tags, marks={PENDING_TAG: mark})
        refused = with_aliases(registry, register(made))
    roll_back(registry, name, "did not arrive in vllm", withdraws=False)
    assert champion(registry, name) == 1
    [_, revoked, _] = registry.versions(name)
    assert revoked.tags[REVOKED_TAG] == "did not arrive in vllm"
    assert withdrawn_experts(registry, name, {"python": ["new"]}) == {}
    assert led_experts(registry, name, recipe="demo") == {"python": {"old", "new"}}
    assert not any(key.startswith(WITHDRAWN_TAG) for key in registry.model_tags(name))
    registry.set_alias(refused, "champion")
    assert roll_back(registry, name, "it was worse")[1].number == 1
