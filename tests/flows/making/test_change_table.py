"""What a flow that changed a model shows of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from texts import pico_recipe

from flows.making.change import (
    begin_change,
    change_table,
    domain_faults,
    other_texts,
    unfinished,
)
from infra.recipe.schema import Lineage
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from upcycle_core.errors import InputError
from upcycle_core.evaluation.report.text import markdown_table


def test_every_domain_stands_before_and_after_the_change():
    before = {"law": 20.0, "code": 8.0, "old": 5.0}
    lines = markdown_table(change_table(before, {"law": 19.0, "code": 8.0, "new": 7.5}))
    assert lines.splitlines()[2:] == [
        "| code | 8.00 | 8.00 | +0.0 % |",
        "| law | 20.00 | 19.00 | -5.0 % |",
        "| new | – | 7.50 | – |",
        "| old | 5.00 | – | – |",
    ]


def test_other_questions_are_said_to_be_others(tmp_path):
    """Instructions that came drew others, or the champion's own became what is judged by."""
    workspace = Workspace(tmp_path / "home" / "tuned")
    (workspace.root / "report").mkdir(parents=True)
    score = {metric: {"mean": 0.5} for metric in ("exact_match", "rouge_l")}
    rows = {"rows": {"simoe": {"seen": score, "unseen": score}}}
    (workspace.root / "report" / "metrics.json").write_text(json.dumps(rows))
    (workspace.root / "instructions").mkdir()
    for split in ("seen", "unseen"):
        (workspace.root / "instructions" / f"{split}.jsonl").write_text("{}")
    recipe = SimpleNamespace(method="simoe", domains=())
    session = SimpleNamespace(workspace=workspace, recipe=recipe, stages=SimpleNamespace(log=print))
    begun = validate(pico_recipe(tmp_path))
    before = begin_change(session, "grow law", begun).texts
    assert unfinished(workspace).texts == before
    (workspace.root / "instructions" / "seen.jsonl").write_text("{}\n{}")
    (workspace.root / ".change.json").unlink()
    after = begin_change(session, "grow code", begun).texts
    (note,) = other_texts(before, after)
    assert note.startswith("The seen questions are others")
    assert list(other_texts(before, before)) == []
    (note,) = other_texts({"law": "1", "code": "2"}, {"law": "3", "code": "2"})
    assert note.startswith("The held-out text of law has changed")


def test_a_change_upon_what_is_not_there_leaves_nothing_behind(tmp_path):
    workspace = Workspace(tmp_path / "home" / "pico")
    recipe = validate(pico_recipe(tmp_path))
    session = SimpleNamespace(workspace=workspace, recipe=recipe, stages=SimpleNamespace(log=print))
    pinned = dict.fromkeys(("tokenizer", "backbone", "seed_text"), "0" * 64)
    with pytest.raises(InputError) as said:
        begin_change(session, "retrain", replace(recipe, lineage=Lineage(pinned=pinned)))
    # Both in one message; a seed's text, which this recipe has none of, is not asked for.
    assert [fault.value for fault in said.value.faults] == ["tokenizer", "backbone"]
    assert unfinished(workspace) is None


def test_of_two_new_domains_each_is_not_told_to_let_the_other_join_first():
    (fault,) = domain_faults("domains", ["law", "new", "newer"], ["law", "new"], joining="new")
    assert fault.field == "domains.newer"
    assert "until new has joined" in fault.remedy
    assert "flows.grow" not in fault.remedy
    said = domain_faults("domains", ["law", "new", "newer"], ["law"])
    assert [fault.remedy.count("flows.grow") for fault in said] == [1, 1]
