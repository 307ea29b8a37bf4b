"""A champion whose alias a person has moved back in MLflow counts as rolled back."""
# ruff: noqa: F811  (fixtures of another file)

import json
from contextlib import nullcontext, suppress

import pytest

from infra.tracking.records import Registration
from tasks.release.history import (
    EXPERTS_TAG,
    FORMER_TAG,
    PENDING_TAG,
    REVOKED_TAG,
    ROLLED_BACK_TAG,
    WITHDRAWN_TAG,
    catch_up,
    led_experts,
    roll_back,
    ways_back,
    withdrawn_experts,
)
from tasks.release.versions import MODEL_TAG, offered, with_aliases
from tests.tasks.release.test_rollback import (  # noqa: F401  (fixtures)
    Killed,
    champion,
    home,
    name,
    register,
    register_as,
    registry,
    session,
    settings,
)

MOVED = "alias moved by hand to version 1"
HELD = {"python": ["bad"]}


@pytest.fixture
def register_with(registry, register):
    """Registers a version with this expert, which becomes champion or is refused."""

    def made(python, mark="champion"):
        tags = {EXPERTS_TAG: json.dumps({"python": python}), MODEL_TAG: python}
        return with_aliases(registry, register(Registration(tags=tags, marks={PENDING_TAG: mark})))

    return made


@pytest.fixture
def good(register_with):
    """Version 1, the champion before version 2, whose expert is bad."""
    version = register_with("good")
    register_with("bad")
    return version


def marks(registry, name):
    return {v.number: v.tags[ROLLED_BACK_TAG] for v in registry.versions(name) if is_marked(v)}


def is_marked(version):
    return ROLLED_BACK_TAG in version.tags


def test_a_champion_that_a_person_took_the_alias_from_counts_as_rolled_back(
    registry, name, good, caplog
):
    registry.set_alias(good, "champion")
    found = catch_up(registry, name)
    assert marks(registry, name) == {2: MOVED}
    assert [is_marked(version) for version in found] == [False, True]
    assert withdrawn_experts(registry, name, HELD) == {"python": 2}
    assert led_experts(registry, name, recipe="demo") == {"python": {"good"}}
    assert registry.model_tags(name)[f"{WITHDRAWN_TAG}python.bad"] == "2"
    assert f"models:/{name}/2 counts as rolled back: {MOVED}" in caplog.text
    caplog.clear()
    catch_up(registry, name)
    assert caplog.text == ""


def test_a_rollback_of_a_version_that_a_person_has_taken_back_says_so(registry, name, good):
    registry.set_alias(good, "champion")
    left, champion = roll_back(registry, name, "bad answers", only=2)
    assert (left.number, champion.number) == (2, good.number)
    assert marks(registry, name) == {2: MOVED}


def test_an_alias_that_is_moved_forward_again_lifts_that(registry, name, good):
    registry.set_alias(good, "champion")
    [_, bad] = catch_up(registry, name)
    registry.set_alias(bad, "champion")
    catch_up(registry, name)
    assert marks(registry, name) == {}
    assert withdrawn_experts(registry, name, HELD) == {}
    assert registry.model_tags(name) == {FORMER_TAG: "2"}


@pytest.mark.parametrize("calls", range(4))
@pytest.mark.parametrize("way", ["back", "forward"])
def test_what_a_kill_left_of_it_is_finished_by_the_next_look(
    registry, name, good, monkeypatch, calls, way
):
    registry.set_alias(good, "champion")
    if way == "forward":
        [_, bad] = catch_up(registry, name)
        registry.set_alias(bad, "champion")
    left = iter(range(calls))

    def stopped(method):
        def stopping(*arguments):
            if next(left, None) is None:
                raise Killed(method)
            return method(*arguments)

        return stopping

    with monkeypatch.context() as patched:
        for call in ("set_tags", "set_model_tags", "remove_tag", "remove_model_tag"):
            patched.setattr(registry, call, stopped(getattr(registry, call)))
        with suppress(Killed):
            catch_up(registry, name)
    catch_up(registry, name)
    assert marks(registry, name) == ({2: MOVED} if way == "back" else {})
    withdrawn = {"python": 2} if way == "back" else {}
    assert withdrawn_experts(registry, name, HELD) == withdrawn
    assert registry.model_tags(name)[FORMER_TAG] == ("1" if way == "back" else "2")


def test_what_flows_have_done_is_nobody_s_hand(registry, name, good, register_with):
    """A promotion, a rollback, a certificate that was taken back."""
    catch_up(registry, name)
    roll_back(registry, name, "it was worse")
    catch_up(registry, name)
    assert marks(registry, name) == {2: "it was worse"}
    register_with("third")
    roll_back(registry, name, "did not arrive in vllm", withdraws=False)
    catch_up(registry, name)
    assert marks(registry, name) == {2: "it was worse"}
    assert REVOKED_TAG in registry.versions(name)[2].tags
    assert champion(registry, name) == 1


def test_a_rollback_that_another_home_is_at_is_nobody_s_hand(registry, name, good, monkeypatch):
    """Nor is a promotion there: who was champion last is read before who is now."""
    catch_up(registry, name)
    read, moves = registry.model_tags, [lambda: roll_back(registry, name, "bad answers")]

    def meanwhile(name):
        tags = read(name)
        if moves:
            moves.pop()()
        return tags

    monkeypatch.setattr(registry, "alone", lambda name: nullcontext())  # of another home
    monkeypatch.setattr(registry, "model_tags", meanwhile)
    catch_up(registry, name)
    assert marks(registry, name) == {2: "bad answers"}


def test_an_older_version_that_was_promoted_later_is_no_sign_of_a_hand(
    registry, name, good, register_with
):
    """Finished by another flow, from what a kill had left of it."""
    waiting = register_with("third", mark="challenger")
    register_with("fourth")
    registry.set_tags(waiting, {PENDING_TAG: "champion"})
    with_aliases(registry, registry.versions(name)[2])
    registry.set_model_tags(name, {FORMER_TAG: "4"})  # the kill came before this one as well
    assert champion(registry, name) == 3
    catch_up(registry, name)
    assert marks(registry, name) == {}


def test_a_killed_promotion_is_not_finished_after_a_person_has_taken_it_back(registry, name, good):
    registry.set_tags(registry.versions(name)[1], {PENDING_TAG: "champion"})  # the last call's
    registry.set_alias(good, "champion")
    catch_up(registry, name)
    assert offered(registry, name, {"bad"}, recipe="demo") is not None
    assert champion(registry, name) == 1


def test_a_version_that_a_person_preferred_has_its_way_back_to_who_stood_before(
    registry, name, register_with
):
    """Older, and never champion until then."""
    register_with("first")
    refused = register_with("refused", mark="challenger")
    register_with("third")
    registry.set_alias(refused, "champion")
    catch_up(registry, name)
    assert marks(registry, name) == {3: "alias moved by hand to version 2"}
    assert 3 in ways_back(registry.versions(name))
    left, now = roll_back(registry, name, "it was worse")
    assert (left.number, now.number) == (2, 3)
    catch_up(registry, name)
    assert marks(registry, name) == {2: "it was worse"}


def test_a_model_without_versions_or_champion_is_let_alone(registry, name, register):
    assert catch_up(registry, "nobody") == []
    register(Registration())
    assert [version.number for version in catch_up(registry, name)] == [1]
