"""A champion that cannot be scored on this run's text is told of before a model is made."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from chat import save_chat_tokenizer
from databases import home_with_database
from texts import pico_recipe

from flows.making import dume
from flows.making.building import build_stages, check_champion
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from tasks.release.comparable import champion_faults
from tasks.release.versions import MODEL_TAG
from upcycle_core.corpora.shards import write_corpus
from upcycle_core.errors import InputError

CHAT = [
    {"role": "user", "content": "What is two and two? " * 4},
    {"role": "assistant", "content": "Four, of course. " * 4},
]
REFUSES = "{{ raise_exception('says four to nobody') }}"
NAME = "upcycle-pico"


class Night:
    """A workspace with the corpora of one domain, and a champion in a registry."""

    def __init__(self, folder):
        self.settings = home_with_database(folder / "home")
        self.registry, self.folder = Registry(self.settings), folder
        self.workspace = Workspace(folder / "home" / "pico")
        self.recipe = validate(pico_recipe(folder, domains=("letters", "numbers")))
        domains = {"letters": self.recipe.domains["letters"]}
        evaluation = replace(self.recipe.evaluation, sequence_length=16, tokens=None)
        self.recipe = replace(self.recipe, domains=domains, evaluation=evaluation)
        tokenizer = self.workspace.stage("tokenizer")
        save_chat_tokenizer(tokenizer, "chatml")
        documents = self.workspace.stage("documents/letters")
        said = " ".join(message["content"] for message in CHAT)
        table = pa.table({"text": [said], "messages": [json.dumps(CHAT)]})
        parquet.write_table(table, documents / "heldout.parquet")
        facts = {"splits": {"heldout": {"documents": 1}}}
        (documents / "manifest.json").write_text(json.dumps(facts))
        corpora = self.workspace.stage("corpora/letters")
        write_corpus(documents, tokenizer, corpora)
        for staged, artifact in (
            (tokenizer, "tokenizer"),
            (documents, "documents/letters"),
            (corpora, "corpora/letters"),
        ):
            self.workspace.publish(staged, artifact, {"fingerprint": artifact})

    def champion(self, kind="llama3", *, template=""):
        """Register a champion with such a tokenizer; returns its files."""
        source = self.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        save_chat_tokenizer(source, kind, template=template)
        (source / "config.json").write_text("{}")
        with Tracker(self.settings, "test").start_run("test") as run:
            version = self.registry.register(NAME, source, Registration(), run=run)
        self.registry.set_alias(version, "champion")
        return self.registry.place(version.reference)

    def session(self, **changes):
        return Session(replace(self.recipe, **changes), self.workspace, log=print)

    def faults(self, **changes):
        return [str(fault) for fault in champion_faults(self.session(**changes), self.registry)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Night(tmp_path_factory.mktemp("night"))


def without_bos(files):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = files / name
        if file.exists():
            own = json.loads(file.read_text())
            own.pop("bos_token", None)
            file.write_text(json.dumps(own))


def test_what_another_tokenizer_cannot_read_is_told(made):
    assert made.faults() == []  # no champion yet
    responses = {"evaluation": replace(made.recipe.evaluation, loss="responses")}
    always = {"corpus": replace(made.recipe.corpus, bos="always")}
    files = made.champion()
    assert made.faults() == made.faults(**always) == []
    [said] = made.faults(**responses)
    assert "evaluation.loss = 'responses'" in said
    assert f"the champion, models:/{NAME}/1, has another tokenizer" in said
    without_bos(files)
    said, *_ = made.faults(**always)
    assert f"the tokenizer of the champion, models:/{NAME}/1, has no beginning" in said
    made.champion(template=REFUSES)
    [said] = made.faults()
    assert "domains.letters.heldout" in said
    assert "says four to nobody" in said
    made.champion(template=None)  # what is said in chats is read
    assert made.faults() == []


def test_a_champion_whose_tokenizer_cannot_be_loaded_is_told_of_when_it_is_scored(made):
    files = made.champion()
    (files / "tokenizer.json").write_text("{}")
    assert made.faults() == []


def test_of_the_same_tokenizer_nothing_is_told(made):
    files = made.champion("chatml", template=REFUSES)
    without_bos(files)
    for changes in (
        {"evaluation": replace(made.recipe.evaluation, loss="responses")},
        {"corpus": replace(made.recipe.corpus, bos="always")},
    ):
        assert made.faults(**changes) == []


def test_a_champion_without_a_template_is_not_asked_in_chats(made):
    made.champion(template=None)
    asked = replace(made.recipe.task_evaluation, chat_template=True)
    tasks = {"quiz": SimpleNamespace()}
    session = SimpleNamespace(
        workspace=made.workspace,
        recipe=replace(made.recipe, task_evaluation=asked, tasks=tasks),
    )
    [said] = map(str, champion_faults(session, made.registry))
    assert "task_evaluation.chat_template = True" in said


class Flow:
    """A session that makes nothing, and says what it was to make."""

    def __init__(self, made):
        self.stages, self.registry, self.made = made.session(), made.registry, []
        self.recipe, self.workspace = self.stages.recipe, made.workspace

    def ensure(self, stage, only=None):
        self.made.append(stage.name)


@pytest.mark.parametrize("build", [dume.build, build_stages])
def test_a_flow_ends_before_anything_is_trained(made, build):
    made.champion(template=REFUSES)
    flow = Flow(made)
    with pytest.raises(InputError, match="says four to nobody"):
        build(flow)
    assert flow.made == ["sources", "documents", "tokenizer", "corpora"]


def test_a_model_that_is_registered_already_is_not_judged_again(made, monkeypatch):
    staged = made.workspace.stage("model")
    (staged / "config.json").write_text("{}")
    made.workspace.publish(staged, "model", {"fingerprint": "model"})
    made.champion(template=REFUSES)
    flow = Flow(made)
    monkeypatch.setattr("flows.making.building.outdated", lambda session, stages: [])
    with pytest.raises(InputError, match="says four to nobody"):  # it is to be registered
        check_champion(flow)
    with Tracker(made.settings, "test").start_run("test") as run:
        tags = {MODEL_TAG: made.workspace.digest("model")}
        made.registry.register(NAME, made.folder / "source", Registration(tags=tags), run=run)
    check_champion(flow)
    monkeypatch.setattr(  # a report asks no champion
        "flows.making.building.outdated", lambda _, of: [s.name for s in of if s.name == "report"]
    )
    check_champion(flow)
    monkeypatch.setattr("flows.making.building.outdated", lambda session, stages: ["experts"])
    with pytest.raises(InputError, match="says four to nobody"):
        check_champion(flow)
