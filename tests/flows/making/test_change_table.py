"""What a flow that changed a model shows of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from texts import pico_recipe

from flows.making.change import (
    begin_change,
    change_table,
    deploy_again,
    domain_faults,
    end_change,
    finish_change,
    going_on,
    modelled_in,
    other_texts,
    unfinished,
)
from flows.running.arguments import parser_of
from flows.running.command_line import SUMMARY
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


def test_a_workspace_that_is_lost_is_restored_and_not_trained_again(tmp_path):
    recipe = validate(pico_recipe(tmp_path))
    workspace = Workspace(tmp_path / "home" / "pico")
    with pytest.raises(InputError, match=r"run flows\.dume; .* flows\.restore upcycle-pico"):
        modelled_in(recipe, workspace)
    workspace.path("sources").mkdir(parents=True)  # there, and nothing can be restored into it
    with pytest.raises(InputError, match=r"run flows\.dume$"):
        modelled_in(recipe, workspace)


def test_what_is_deployed_again_is_what_the_command_was_told():
    told = [
        [],
        ["--add", "tasks.yaml"],
        ["--add", "my tasks.yaml"],
        ["--set", "folder=/data/a b", "--set", "seed=3"],
    ]
    alone, beside, blanks, changed = (
        deploy_again(parser_of("grow").parse_args(["my.yaml", "law", *options])) for options in told
    )
    assert alone.endswith("make deploy RECIPE=my.yaml.")
    assert beside.endswith('make deploy RECIPE="my.yaml tasks.yaml".')
    assert blanks.endswith("-m infra.services deploy my.yaml 'my tasks.yaml'")
    assert changed.endswith("deploy my.yaml --set 'folder=/data/a b' --set seed=3")


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


class Grown:
    """A session on a workspace whose model has two domains, while a third one came."""

    def __init__(self, folder):
        self.workspace = Workspace(folder / "home" / "pico")
        self.recipe = replace(
            validate(pico_recipe(folder, domains=("letters", "numbers"))), lineage=Lineage()
        )
        self.stages = SimpleNamespace(log=print)
        self.run = SimpleNamespace(
            set_tags=print, log_metrics=print, log_text=lambda text, file: None
        )
        self.began = 0.0
        (self.workspace.root / SUMMARY).parent.mkdir(parents=True)
        (self.workspace.root / SUMMARY).write_text("")
        self.publish("letters", "numbers")

    def publish(self, *domains, averaged=()):
        averages = {f"experts/{domain}": "0" for domain in averaged}
        self.workspace.publish(self.workspace.stage("backbone"), "backbone", {"inputs": averages})
        for artifact, files in (("model", {}), ("report", {"metrics.json": self.scores(domains)})):
            staged = self.workspace.stage(artifact)
            for file, text in files.items():
                (staged / file).write_text(text)
            inputs = {f"experts/{domain}": "0" for domain in domains}
            inputs["backbone"] = self.workspace.digest("backbone")
            self.workspace.publish(staged, artifact, {"inputs": inputs})

    @staticmethod
    def scores(domains):
        return json.dumps({"perplexity": {"dume": dict.fromkeys(domains, float(len(domains)))}})

    def night(self):
        """What ``flows.retrain`` makes of a change that was stopped."""
        stopped = going_on(self.recipe, self.workspace)
        what = "retrain letters" if stopped is None else stopped.what
        change = begin_change(self, what, self.recipe)
        return change

    def end(self, change):
        version = SimpleNamespace(reference="models:/upcycle-pico/2")
        finish_change(self, change, SimpleNamespace(version=version, verdict="as it was"))


@pytest.fixture
def grown(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.making.change.create_markdown_artifact", lambda **options: None)
    return Grown(tmp_path)


def test_a_night_does_not_end_the_growing_of_a_domain_that_the_model_lacks(grown):
    """Its expert may have been trained for hours; flows.tidy leaves what is coming."""
    begin_change(grown, "grow colours", grown.recipe)
    assert going_on(grown.recipe, grown.workspace) is None  # a night without news has none to do
    night = grown.night()
    assert night.what == "retrain letters"
    assert unfinished(grown.workspace).coming == ("colours",)  # the night may be killed as well
    assert grown.night() == night
    grown.end(night)
    left = unfinished(grown.workspace)
    assert (left.what, left.coming) == ("grow colours", ("colours",))
    other = begin_change(grown, "grow law", grown.recipe)
    assert other.coming == ("law", "colours")
    assert begin_change(grown, "grow colours", grown.recipe).coming == ("colours", "law")
    grown.publish("letters", "numbers", "colours", "law")  # killed before they were registered
    assert grown.night().what == "grow colours"
    grown.end(unfinished(grown.workspace))
    grown.end(grown.night())
    assert unfinished(grown.workspace) is None


def test_a_growing_that_waited_is_of_the_model_that_a_night_has_made(grown):
    begin_change(grown, "grow colours", grown.recipe)
    night = grown.night()
    metrics = grown.workspace.path("report") / "metrics.json"
    metrics.write_text(json.dumps({"perplexity": {"dume": {"letters": 7.0}}}))
    grown.end(night)
    assert begin_change(grown, "grow colours", grown.recipe).before == {"letters": 7.0}


def test_a_night_does_not_end_the_shrinking_by_a_domain_that_the_model_has(grown):
    begin_change(grown, "shrink numbers", grown.recipe)
    assert going_on(grown.recipe, grown.workspace) is None
    assert grown.night().what == "retrain letters"
    begin_change(grown, "shrink numbers", grown.recipe)
    grown.publish("letters")
    assert grown.night().what == "shrink numbers"


def test_a_night_does_not_end_a_rebuild_that_has_not_averaged_anew(grown):
    begin_change(grown, "grow numbers", grown.recipe, rebuild=True)
    grown.publish("letters", "numbers", averaged=["letters"])
    assert going_on(grown.recipe, grown.workspace) is None
    grown.publish("letters", "numbers", averaged=["letters", "numbers"])
    assert going_on(grown.recipe, grown.workspace).rebuild
    begin_change(grown, "shrink colours", grown.recipe, rebuild=True)  # it had left without
    grown.publish("letters", "numbers", averaged=["letters", "numbers", "colours"])
    assert going_on(grown.recipe, grown.workspace) is None
    grown.publish("letters", "numbers", averaged=["letters", "numbers"])
    assert going_on(grown.recipe, grown.workspace).what == "shrink colours"
    assert not begin_change(grown, "shrink colours", grown.recipe).rebuild
    assert not unfinished(grown.workspace).rebuild


def test_a_model_made_as_a_whole_leaves_no_change_but_what_waits(grown):
    """Its scores before are of a model that is no more."""
    begin_change(grown, "grow colours", grown.recipe)
    grown.publish("letters")
    end_change(grown)
    left = unfinished(grown.workspace)
    assert (left.what, left.before) == ("grow colours", {"letters": 1.0})
    grown.publish("letters", "colours")
    end_change(grown)
    assert unfinished(grown.workspace) is None
    begin_change(grown, "retrain letters", grown.recipe)
    end_change(grown)
    assert unfinished(grown.workspace) is None


def test_of_two_new_domains_each_is_not_told_to_let_the_other_join_first():
    (fault,) = domain_faults("domains", ["law", "new", "newer"], ["law", "new"], joining="new")
    assert fault.field == "domains.newer"
    assert "until new has joined" in fault.remedy
    assert "flows.grow" not in fault.remedy
    said = domain_faults("domains", ["law", "new", "newer"], ["law"])
    assert [fault.remedy.count("flows.grow") for fault in said] == [1, 1]
