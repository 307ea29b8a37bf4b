"""Flows that find a workspace held by another one."""

import errno
import os
import sys
import threading
import time
from contextvars import copy_context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running
from prefect_server import prefect_server
from texts import DOMAINS, pico_recipe, save_recipe

from flows import restore as restores
from flows import rollback as rolls_back
from flows.retrain import retrain
from flows.running import interrupted
from flows.running import turn as turns
from flows.running.interrupted import close_interrupted
from flows.running.turn import WAITING, live, turn
from flows.tidy import tidy
from infra.cluster.calls import run_program
from infra.recipe.schema import resolve
from infra.temporary import hold
from tasks.engine.workspace import Held, Workspace
from tasks.recipes import load_recipe
from upcycle_core.errors import Fault, InputError

SOON = 240
MODEL = "upcycle-pico-turn"


@pytest.fixture(autouse=True)
def poll(monkeypatch):
    monkeypatch.setattr(turns, "POLL_SECONDS", 0.02)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("UPCYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    return Workspace(tmp_path / "home" / "pico-turn")


@pytest.fixture
def recipe(tmp_path):
    values = pico_recipe(tmp_path, name="pico-turn", domains=DOMAINS[:2])
    return load_recipe(save_recipe(tmp_path / "recipe.yaml", values))


@pytest.fixture
def server():
    with (
        temporary_settings({PREFECT_API_URL: prefect_server()}),
        get_client(sync_client=True) as client,
    ):
        yield client
        APILogWorker.drain_all(timeout=5)  # while the server is there


def patient(recipe, minutes):
    return replace(recipe, compute=replace(recipe.compute, wait_minutes=minutes))


def until(moment):
    deadline = time.monotonic() + SOON
    while not moment():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def places(workspace):
    return sorted((workspace.root / ".waiting").glob("[0-9]*"))


def start(call, *arguments):
    context = copy_context()  # Prefect's settings
    thread = threading.Thread(target=context.run, args=(call, *arguments), daemon=True)
    thread.start()
    return thread


def test_those_who_wait_come_in_turn_and_say_for_whom(workspace, recipe, capsys):
    order = []

    def work(name):
        with turn(workspace, f"flow {name}", recipe):
            order.append(name)
            time.sleep(0.1)

    threads = []
    with workspace.lock("the first"):
        for count, name in enumerate("abc", 1):
            threads.append(start(work, name))
            until(lambda count=count: len(places(workspace)) == count)
        line = f"waiting for the first, process {workspace.holder().split()[-1]}, at work in "
        until(lambda: capsys.readouterr().out.startswith(f"{line}{workspace.root}, 30 minutes"))
    late = start(work, "late")  # the queue is not empty: what is free is not for it
    for thread in [*threads, late]:
        thread.join(SOON)
    assert order == ["a", "b", "c", "late"]
    assert not places(workspace)


def test_waiting_ends_after_the_time_that_the_recipe_names(workspace, recipe):
    with (
        workspace.lock("the first"),
        pytest.raises(Held, match=r"held by the first, process \d+ for longer than the 0.005 min"),
        turn(workspace, "the second", patient(recipe, 0.005)),
    ):
        pass
    with (
        workspace.lock("the first"),
        pytest.raises(Held, match=r"held by the first, process \d+; wait until it ends, or stop"),
        turn(workspace, "the second", patient(recipe, 0)),
    ):
        pass
    assert not places(workspace)


def test_one_that_was_killed_while_it_waited_is_not_waited_for(workspace, recipe):
    folder = workspace.root / ".waiting"
    folder.mkdir(parents=True)
    (folder / "00000000000000000001@killed").touch()
    with turn(workspace, "the next", patient(recipe, 0)):
        assert not places(workspace)


def begun(server, recipe):
    """A run of a flow that Prefect takes for running."""
    body = {"flow_id": str(server.create_flow_from_name("dume")), "parameters": {}}
    body["parameters"]["recipe"] = resolve(recipe)
    body["state"] = Running().model_dump(mode="json", include={"type", "name"})
    return UUID(server.request("POST", "/flow_runs/", json=body).json()["id"])


def test_a_flow_that_waits_is_seen_and_is_not_taken_for_a_killed_one(
    workspace, recipe, server, monkeypatch
):
    results = []
    with workspace.lock("another flow"):
        flow = start(lambda: results.append(tidy(recipe)))
        until(lambda: places(workspace))
        monkeypatch.setattr(interrupted, "BEGIN_SECONDS", 0)
        run = UUID(places(workspace)[0].name.partition("@")[2])
        until(lambda: server.read_flow_run(run).state.name == WAITING)
        assert "waiting for another flow, process" in server.read_flow_run(run).state.message
        killed = begun(server, recipe)
        close_interrupted(workspace, MODEL)
        assert server.read_flow_run(run).state.name == WAITING
        assert server.read_flow_run(killed).state.is_crashed()
    flow.join(SOON)
    assert results
    assert server.read_flow_run(run).state.is_completed()


def test_one_that_has_let_go_is_alive_until_its_process_ends(
    workspace, recipe, server, monkeypatch
):
    """Prefect hears how a run has ended after others can hold its workspace."""
    run, held = begun(server, recipe), []
    monkeypatch.setattr(turns, "_held_till_the_end", held)
    monkeypatch.setattr(interrupted, "BEGIN_SECONDS", 0)
    with monkeypatch.context() as its_own:
        its_own.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
        with turn(workspace, "the first", recipe):
            pass
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(run).state.is_running()
    for file in held:  # as the process ends
        file.close()
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(run).state.is_crashed()
    assert not list((workspace.root / ".waiting").glob("run@*"))


def test_one_of_another_home_is_not_taken_for_a_killed_one(workspace, recipe, server, monkeypatch):
    """A team's server has the nights of both, and their workspaces have one name."""
    theirs, held = Workspace(workspace.root.parents[1] / "theirs" / "pico-turn"), []
    monkeypatch.setattr(turns, "_held_till_the_end", held)
    monkeypatch.setattr(interrupted, "BEGIN_SECONDS", 0)
    run = begun(server, recipe)
    theirs.root.mkdir(parents=True)
    with monkeypatch.context() as its_own:
        its_own.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
        live(theirs.root.parent, theirs.root.name)
    assert len(held) == 1
    workspace.root.mkdir(parents=True)
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(run).state.is_running()
    held.pop().close()  # it is killed
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(run).state.is_running()
    moved = Workspace(theirs.root.parents[1] / "moved" / "pico-turn")
    theirs.root.parent.rename(moved.root.parent)
    close_interrupted(moved, MODEL)
    assert server.read_flow_run(run).state.is_crashed()


def test_a_killed_restore_is_closed_and_not_one_into_another_home(workspace, server, monkeypatch):
    monkeypatch.setattr(interrupted, "BEGIN_SECONDS", 0)

    def begin(**parameters):
        body = {"flow_id": str(server.create_flow_from_name("x")), "tags": ["pico-turn"]}
        body |= {"name": "x", "parameters": parameters}
        body["state"] = Running().model_dump(mode="json", include={"type", "name"})
        return UUID(server.request("POST", "/flow_runs/", json=body).json()["id"])

    killed = begin(name="upcycle-pico-turn", version="1", into=None)
    others = [begin(name="upcycle-pico-turn", version="1", into="/x"), begin(run="x", block="y")]
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(killed).state.is_crashed()
    assert all(server.read_flow_run(other).state.is_running() for other in others)


@pytest.mark.parametrize("closes", ["the next rollback", "the next flow in the workspace"])
def test_a_killed_rollback_is_closed_and_not_one_that_lives(workspace, server, monkeypatch, closes):
    home, own = workspace.root.parent, []
    home.mkdir()
    monkeypatch.setattr(interrupted, "BEGIN_SECONDS", 0)

    def begin(flow, name):
        body = {"flow_id": str(server.create_flow_from_name(flow)), "parameters": {"name": name}}
        body["state"] = Running().model_dump(mode="json", include={"type", "name"})
        return UUID(server.request("POST", "/flow_runs/", json=body).json()["id"])

    def look(*_, **_options):
        own.extend(path.name for path in (home / ".waiting").glob("run@*"))
        raise InputError(Fault("name", MODEL, "is no registered model"))

    killed, lives = [begin("rollback", MODEL)], begin("rollback", MODEL)
    others = [begin("rollback", "upcycle-another"), begin("somebody's", MODEL)]
    with hold(home / ".waiting" / f"run@{lives}"):
        if closes == "the next rollback":
            monkeypatch.setattr(rolls_back, "roll_back", look)
            state = rolls_back.rollback(MODEL, return_state=True)
            assert f"run@{state.state_details.flow_run_id}" in own
        else:
            killed.append(begin("rollback", f"{MODEL}-ders"))
            close_interrupted(workspace, MODEL, f"{MODEL}-ders")
    assert all(server.read_flow_run(run).state.is_crashed() for run in killed)
    assert all(server.read_flow_run(run).state.is_running() for run in (lives, *others))


def test_one_that_began_before_the_clock_was_set_back_is_closed_too(
    workspace, recipe, server, monkeypatch
):
    run, yesterday = begun(server, recipe), datetime.now(UTC) - timedelta(days=1)
    monkeypatch.setattr(interrupted, "datetime", SimpleNamespace(now=lambda zone: yesterday))
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(run).state.is_crashed()


def test_a_restore_says_of_which_recipe_it_is_and_that_it_is_alive(
    workspace, recipe, server, monkeypatch
):
    found = SimpleNamespace(reference="models:/upcycle-pico-turn/1", number=1)
    lives = []

    def bring(*_):
        lives.append([path.name for path in (workspace.root / ".waiting").glob("run@*")])

    monkeypatch.setattr(restores, "look", lambda *_: (found, recipe, workspace, "remote"))
    monkeypatch.setattr(restores, "_bring", bring)
    monkeypatch.setattr(restores, "_check", lambda *_: 1)
    run = restores.restore("upcycle-pico-turn", return_state=True).state_details.flow_run_id
    assert lives == [[f"run@{run}"]]
    assert server.read_flow_run(run).tags == ["pico-turn"]


def test_a_restore_may_take_longer_than_the_nights_of_its_model(
    workspace, recipe, server, monkeypatch
):
    found = SimpleNamespace(reference="models:/upcycle-pico-turn/1", number=1)
    late = replace(recipe, compute=replace(recipe.compute, limit_hours=1e-6))

    def bring(session, *_):
        session.check()
        run_program([sys.executable, "-c", ""], folder=workspace.root, environment=os.environ)

    monkeypatch.setattr(restores, "look", lambda *_: (found, late, workspace, "remote"))
    monkeypatch.setattr(restores, "_bring", bring)
    monkeypatch.setattr(restores, "_check", lambda *_: 1)
    assert restores.restore("upcycle-pico-turn", return_state=True).is_completed()


@pytest.mark.parametrize("why", [errno.EPERM, errno.ENOSPC])
def test_a_home_on_a_disk_without_links_has_an_identity_and_a_full_one_is_not_littered(
    tmp_path, monkeypatch, why
):
    def refused(*_, **__):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "link", refused)
    first, second = turns.identity(tmp_path), turns.identity(tmp_path)
    assert first == second
    there = [path.read_text() for path in (tmp_path / ".waiting").iterdir()]
    assert there == ([] if why == errno.ENOSPC else [first])


def test_one_that_has_just_begun_is_not_taken_for_a_killed_one(workspace, recipe, server):
    run = begun(server, recipe)
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(run).state.is_running()


def test_one_that_has_ended_well_meanwhile_stays_so(workspace, recipe, server, monkeypatch):
    run = begun(server, recipe)
    monkeypatch.setattr(interrupted, "BEGIN_SECONDS", 0)

    def end(*_):
        server.set_flow_run_state(run, Completed())
        return False

    monkeypatch.setattr(interrupted, "is_alive", end)
    close_interrupted(workspace, MODEL)
    assert server.read_flow_run(run).state.is_completed()


def test_a_night_that_waited_in_vain_is_skipped_and_a_command_fails(
    workspace, recipe, server, monkeypatch
):
    with workspace.lock("another flow"):
        with pytest.raises(Held):
            retrain(patient(recipe, 0.005))
        # What Prefect's worker sets for the flows that it starts.
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "a-deployment")
        state = retrain(patient(recipe, 0.005), return_state=True)
    assert (state.type.value, state.name) == ("COMPLETED", "Skipped")
    assert "held by another flow" in state.message
