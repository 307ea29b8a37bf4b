"""What a flow asks of its stages."""

import pytest

from flows.running.session import FlowSession
from tasks.data.documents import documents
from tasks.data.sources import sources
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe


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
