"""What a flow asks of its stages."""

import socket
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from prefect.utilities.collections import visit_collection
from prefect.utilities.engine import resolve_to_final_result

from flows.running import session as module
from flows.running.session import FlowSession
from infra.recipe.schema import Lineage
from infra.versioning.versions import Versions
from tasks.data.documents import documents
from tasks.data.seed import seed
from tasks.data.sources import sources
from tasks.data.tokenizer import tokenizer
from tasks.dume.experts import parents
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from upcycle_core.errors import InputError

PIPELINE = "stages:\n  seed: {cmd: 'true', outs: [seed]}\n"
SECONDS = 2


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A session, and {stage: how many items it was run for each time}."""
    stages = Session(load_recipe(CODE / "recipes/demo.yaml"), Workspace(tmp_path), log=print)
    session = FlowSession(None, stages, run=None, registry=None, versions=None)
    counts = {}

    def submit(stage, items):
        counts.setdefault(stage.name, []).append(len(items))
        return []

    monkeypatch.setattr(session, "_submit", submit)
    yield session, counts
    session.close()


def test_what_lies_outside_is_looked_at_once(asked):
    """Text that arrives during a flow would be learnt by an expert whose parent nobody chose."""
    session, counts = asked
    for _ in range(2):
        session.ensure(sources)
        session.ensure(documents)
    assert counts == {"sources": [1, 0], "documents": [4, 4]}


def test_an_expert_with_new_text_goes_on_in_whatever_flow(asked, monkeypatch):
    """What it had learnt would be lost, were it trained from what it was continued from."""
    session, counts = asked
    calls = []

    def named(recipe, led):
        calls.append((led, len(counts["parents"])))
        return replace(recipe, lineage=Lineage(parents={"python": "1"}))

    def adopt(recipe):
        calls.append(dict(recipe.parents))
        session.recipe = recipe

    looked = []
    monkeypatch.setattr(
        "flows.running.session.catch_up", lambda registry, name: looked.append(name)
    )
    monkeypatch.setattr(
        "flows.running.session.led_experts",
        lambda registry, name, recipe: {name: {"1"}} if looked else None,
    )
    monkeypatch.setattr(
        "flows.running.session.with_parents",
        lambda recipe, workspace, *, led: named(recipe, led),
    )
    monkeypatch.setattr(session, "adopt", adopt)
    session.ensure(parents)
    assert calls == []  # nothing was built upon yet
    session.recipe = session.stages.recipe = replace(session.recipe, lineage=Lineage())
    session.ensure(parents)
    assert calls == [({"upcycle-demo": {"1"}}, 1), {"python": "1"}]
    session.ensure(parents)
    session.ensure(documents)
    assert len(calls) == 3  # looked at again, with nothing to adopt


class Changing(set):
    """What another stage adds to at this moment."""

    def __iter__(self):
        raise RuntimeError("Set changed size during iteration")


def test_prefect_does_not_look_into_what_stages_change(asked, monkeypatch):
    """It walks what a task is given, before the task runs, beside stages that are at work."""
    session, _ = asked
    session.stages.whole = Changing()
    given = []

    class Step:
        def with_options(self, **options):
            return self

        def submit(self, *arguments, wait_for):
            given.append(arguments)

    monkeypatch.undo()
    monkeypatch.setattr("flows.running.session.task", lambda **options: lambda function: Step())
    session._submit(sources, [""])
    session._submitted.clear()
    walk = {"context": {}, "return_data": True, "remove_annotations": True}
    assert visit_collection(given[0][0], resolve_to_final_result, **walk) is session.stages


class Remembering(Versions):
    """DVC as far as a session sees it: what is committed stands in the lock."""

    def commit(self, stages):
        self.commits = list(stages)
        if stages:
            entries = {
                name: {"cmd": "true", "outs": [{"path": name, "md5": "0"}]}
                for name in {*self.recorded(), *stages}
            }
            (self.root / "dvc.lock").write_text(str({"stages": entries}))


def published(folder):
    """A recipe without a remote, a workspace with a tokenizer and a seed, and its DVC."""
    recipe = load_recipe(CODE / "recipes/demo.yaml")
    recipe = replace(recipe, versions=replace(recipe.versions, remote=None))
    workspace, versions = Workspace(folder), Remembering(folder)
    for name in ("tokenizer", "seed"):
        staged = workspace.stage(name)
        (staged / "file").write_text(name)
        workspace.publish(staged, name, {})
    return recipe, workspace, versions


def test_what_a_lost_lock_named_is_recorded_again(tmp_path):
    recipe, workspace, versions = published(tmp_path)

    def commits():
        stages = Session(recipe, workspace, log=print)
        session = FlowSession(None, stages, run=None, registry=None, versions=versions)
        for stage in (tokenizer, seed):
            session._record(stage, [""])
        session.finish()
        session.close()
        return versions.commits

    assert commits() == ["tokenizer", "seed"]
    assert commits() == []
    (tmp_path / "dvc.lock").unlink()
    assert commits() == ["tokenizer", "seed"]
    assert commits() == []


def test_what_a_stopped_flow_published_of_other_domains_is_recorded_before_a_version_is(tmp_path):
    """A grow looks at its own domain alone, and joins what is there of the others."""
    recipe, workspace, versions = published(tmp_path)
    for name in ("experts/python", "documents/python"):
        staged = workspace.stage(name)
        (staged / "file").write_text(name)
        workspace.publish(staged, name, {})
    stages = Session(recipe, workspace, log=print)
    session = FlowSession(None, stages, run=None, registry=None, versions=versions)
    session.finish()
    session.close()
    assert set(versions.commits) == {"experts@python", "documents@python"}


def test_a_commit_records_what_was_published_before_it_was_submitted(tmp_path):
    """What comes later is the next one's: no two threads share a dict."""
    recipe, workspace, versions = published(tmp_path)
    stages = Session(recipe, workspace, log=print)
    session = FlowSession(None, stages, run=None, registry=None, versions=versions)
    busy = threading.Event()
    session._committer.submit(busy.wait)
    session._record(tokenizer, [""])
    session._submit_commit()
    session._record(seed, [""])
    busy.set()
    session._commits[0].result()
    assert versions.commits == ["tokenizer"]
    session.finish()
    session.close()
    assert versions.commits == ["seed"]


@pytest.fixture
def silent():
    """The address of a store that takes every call and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/store"


def test_a_push_that_hangs_ends_at_the_recipe_s_limit(tmp_path, silent, monkeypatch):
    recipe, closed = load_recipe(CODE / "recipes/demo.yaml"), []
    recipe = replace(
        recipe,
        compute=replace(recipe.compute, limit_hours=SECONDS / 3600),
        versions=replace(recipe.versions, remote=silent),
    )
    monkeypatch.setenv("UPCYCLE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(module, "check_room", lambda compute: None)
    monkeypatch.setattr(module, "close_interrupted", lambda _, *models: closed.extend(models))
    monkeypatch.setattr(module, "pieces_run", lambda *_: nullcontext())
    monkeypatch.setattr(module, "dvc_yaml", lambda recipe: PIPELINE)
    published(tmp_path / recipe.name)

    def run():
        with module.open_session("test", recipe, is_held=True) as session:
            session.stages.began = time.monotonic() + 3600
            session._record(seed, [""])
            session._submit_commit()
            session._commits.pop().result()
            session.stages.began = time.monotonic()
            session.finish()

    with pytest.raises(InputError, match=r"compute\.limit_hours.*the flow has worked for longer"):
        run()
    assert Versions(tmp_path / recipe.name).recorded() == {"seed"}
    assert closed == ["upcycle-demo", "upcycle-demo-ders"]  # whose killed rollbacks are looked for
