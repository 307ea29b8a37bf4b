"""What joining experts in closed form has cost, beside the report."""

import json
from types import SimpleNamespace

import pytest
from texts import pico_recipe

from flows.pages import model
from flows.pages.joining import core_seconds, sentence
from tasks.engine.costs import Cost, write_cost
from tasks.engine.workspace import Workspace
from tasks.recipes import validate

SECONDS = {"statistics": 4.0, "repaired": 13.0, "routed": 2.0, "router": 0.5}


@pytest.fixture
def values(tmp_path):
    return pico_recipe(tmp_path, domains=("a", "b"))


@pytest.fixture
def workspace(tmp_path):
    workspace = Workspace(tmp_path / "w")
    workspace.root.mkdir()
    for name, seconds in SECONDS.items():
        items = ("@a", "@b") if name in ("statistics", "repaired") else ("",)
        for item in items:
            write_cost(workspace, f"{name}{item}", Cost(seconds, 1))
    return workspace


def test_the_repair_stands_beside_the_statistics_pass(values, workspace):
    assert core_seconds(validate(values), workspace) == {"statistics": 8.0, "routers": 0.5}
    values["experts"] |= {"repair": "down"}
    assert core_seconds(validate(values), workspace)["repair"] == 26.0
    values["experts"] |= {"repair_tokens": "routed"}
    found = core_seconds(validate(values), workspace)
    assert found == {"statistics": 8.0, "repair": 28.0, "routers": 0.5}
    said = "statistics 8.0, repair 28.0 (3.5 times the statistics), routers 0.5."
    assert sentence(found) == f"Joining took, in core seconds: {said}"


def test_what_was_made_elsewhere_is_not_said(values, workspace):
    values["experts"] |= {"repair": "down"}
    (workspace.root / ".costs" / "repaired@a.json").unlink()
    found = core_seconds(validate(values), workspace)
    assert found == {"statistics": 8.0, "routers": 0.5}
    assert sentence(found, {}) == ""


def test_a_flow_logs_it_and_says_it_on_its_pages(values, workspace, monkeypatch):
    report = workspace.path("report")
    report.mkdir()
    scores = {"normalised_average": {"dume": 90.0}, "normalised": {}, "heldout": {}}
    (report / "metrics.json").write_text(json.dumps({**scores, "perplexity": {"dume": {}}}))
    logged, shown = {}, {}
    monkeypatch.setattr(model, "publish_outcome", lambda s, o, figures, d: logged.update(figures))
    monkeypatch.setattr(model, "corpora_of", lambda *_: ())
    monkeypatch.setattr(model, "publish_table", lambda *_: None)
    monkeypatch.setattr(model, "create_markdown_artifact", lambda **given: shown.update(given))
    monkeypatch.setattr(model, "_pages", lambda *_: {})
    timings = {"stages": {}, "wall": 1.0, "pieces": 0.0}
    session = SimpleNamespace(
        workspace=workspace, recipe=validate(values), timings=lambda: timings, settings=None
    )
    version = SimpleNamespace(name="x", number=1, aliases=(), reference="x/1", description="")
    model.publish_artifacts(session, SimpleNamespace(version=version, verdict="new"))
    assert logged["core_seconds/statistics"] == 8.0
    assert logged["core_seconds/routers"] == 0.5
    assert "Joining took, in core seconds: statistics 8.0, routers 0.5." in shown["markdown"]
