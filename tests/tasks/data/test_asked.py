"""What the recipe asks for and the text or the models do not have is said."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pico import save_pico
from texts import pico_recipe, save_recipe, write_texts

from flows.dume import main
from infra.recipe.schema import Lineage
from tasks.data.asked import say_lacking
from tasks.data.documents import drawn_anew, gone_files
from tasks.data.sources import sources
from tasks.engine.artifacts import FORMS
from tasks.engine.sources import CODE
from tasks.engine.stage_run import Session, StageRun
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe, validate
from upcycle_core.corpora.config import Source
from upcycle_core.corpora.shards import write_split

DOMAINS = ("letters", "numbers")


@pytest.fixture
def said():
    return []


@pytest.fixture
def run(said):
    session = SimpleNamespace(log=said.append)
    return SimpleNamespace(session=session, item="law", stage=SimpleNamespace(label="{}".format))


def test_a_harvest_drawn_anew_for_a_model_that_goes_on_is_said():
    recipe = load_recipe(CODE / "recipes" / "demo.yaml")
    assert not list(drawn_anew(recipe, "python", {}))
    begun = replace(recipe, lineage=Lineage())
    (said,) = drawn_anew(begun, "python", {})
    assert said.endswith("domains.python.heldout")
    own = replace(begun.domains["python"], heldout=Source(files=("held.txt",)))
    named = replace(begun, domains={**begun.domains, "python": own})
    assert not list(drawn_anew(named, "python", {"seed": 1}))
    texts = replace(own, train=Source(files=("train.txt",)), heldout=None)
    grows = replace(begun, domains={**begun.domains, "python": texts})
    assert not list(drawn_anew(grows, "python", {}))  # for good, each document by itself


def test_a_seed_or_a_larger_share_that_draws_held_out_text_anew_is_said(tmp_path):
    recipe = validate(pico_recipe(tmp_path, domains=DOMAINS))
    own = replace(recipe.domains["letters"], heldout=None)
    recipe = replace(recipe, domains={**recipe.domains, "letters": own})
    begun = replace(recipe, lineage=Lineage())
    share = recipe.corpus.heldout_share
    made = {"seed": recipe.seed, "corpus.heldout_share": share}
    assert not list(drawn_anew(begun, "letters", made))
    assert not list(drawn_anew(begun, "letters", {**made, "corpus.heldout_share": 2 * share}))
    for other in ({**made, "seed": recipe.seed + 1}, {**made, "corpus.heldout_share": share / 2}):
        (said,) = drawn_anew(begun, "letters", other)
        assert "and was" in said
        assert said.endswith("domains.letters.heldout")
        assert not list(drawn_anew(recipe, "letters", other))  # all is made anew


def test_files_that_a_domain_has_no_more_are_said():
    """A pattern stands for fewer files where a disk is not mounted, and nothing fails."""
    texts = {"files": {"a.txt": "1", "more/b.txt": "2", "more/c.txt": "3"}}
    before = {"sources": {"train": texts, "heldout": {"harvest": "python", "digest": "4"}}}
    assert not list(gone_files(None, before))
    assert not list(gone_files(before, before))
    renamed = {"files": {"a.txt": "1", "b.txt": "2", "c.txt": "3", "new.txt": "5"}}
    assert not list(gone_files(before, {"sources": {"train": renamed, "heldout": texts}}))
    (said,) = gone_files(before, {"sources": {"train": {"files": {"a.txt": "1"}}}})
    assert "train is read without 2 of its 3 files of before, 'more/b.txt' the first" in said


def test_a_corpus_with_fewer_tokens_than_asked_for_is_said(run, said, tmp_path):
    write_split(tmp_path / "law", [([1, 2, 3], 3)] * 10, eos_id=0, vocabulary_size=9)
    texts = {"law/train": tmp_path / "law"}
    for asked in (None, 1, 30):
        say_lacking(run, texts, asked, key="statistics.tokens")
    assert said == []
    say_lacking(run, texts, 1000, key="statistics.tokens")
    say_lacking(run, texts, 60, key="experts", again=True)
    assert said == [
        "law: statistics.tokens asks for 1,000 tokens, and law/train has 30: all of them are read",
        "law: experts asks for 60 tokens, and law/train has 30: they are read 2.0 times over",
    ]


def written_sources(tmp_path, said, *seeds):
    """What the stage ``sources`` leaves of given experts, random ones of these seeds."""
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    del values["seed_model"], values["experts"], values["tokenizer"]
    for domain, seed in zip(DOMAINS, seeds, strict=True):
        expert = save_pico(tmp_path / domain, seed=seed)
        (expert / "README.md").write_text(domain)
        values["domains"][domain]["expert"] = str(expert)
    session = Session(validate(values), Workspace(tmp_path / "home/pico"), log=said.append)
    out = tmp_path / "out"
    out.mkdir()
    sources.function(StageRun(session, sources, "", out=out, mark="", recorder=None))
    forms = {d: json.loads((out / FORMS / d / "form.json").read_text()) for d in DOMAINS}
    return {domain: " ".join(form["said"]) for domain, form in forms.items()}


def test_experts_that_share_no_seed_are_warned_of_and_symphony_is_offered(tmp_path, said):
    forms = written_sources(tmp_path, said, 0, 1)
    [line] = [line for line in said if line.startswith("WARNING")]
    assert line.startswith("WARNING: numbers: shares no seed with letters")
    assert "1.4" in line
    assert "`symphony: {}`" in line
    assert forms["letters"] == ""
    assert "shares no seed with letters" in forms["numbers"]  # for the report and the card


def test_what_no_machine_has_is_refused_in_one_line_before_there_is_a_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("UPCYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    values = pico_recipe(tmp_path, domains=DOMAINS)
    values["compute"] = {"cpus": 2, "statistics": {"cpus": 3}}
    assert main([str(save_recipe(tmp_path / "recipe.yaml", values))]) == 2
    said = capsys.readouterr().err
    assert said == (
        "compute.statistics.cpus = 3: Ray has 2 in all; ask for less, or start Ray with more\n"
    )
    assert not (tmp_path / "home" / "pico").exists()
