"""What is looked at before strangers are trained, and what outlives a kill behind it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from pico import save_pico, save_pico_tokenizer
from vocabularies import CODE, byte_level

from infra.cluster.pieces import Done
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from tasks.symphony.pairs import pairs
from tasks.symphony.prepared import corpus_faults, expert_faults
from tasks.symphony.unified import united
from upcycle_core.corpora.chat_template import Encoded
from upcycle_core.corpora.shards import write_split

TEXT = {"files": ["text.txt"]}


def recipe_of(folder, **symphony):
    """One given model, and two that are trained here and share a tokenizer."""
    domains = {name: {"train": TEXT} for name in ("code", "law", "physics")}
    domains["law"]["origin"] = {"model": str(folder / "law")}
    values = {"name": "strangers", "domains": domains, "moe": {"top_k": 2}}
    return validate({**values, "symphony": symphony})


@pytest.fixture
def session(tmp_path):
    save_pico(tmp_path / "law")
    return SimpleNamespace(
        recipe=recipe_of(tmp_path), workspace=Workspace(tmp_path / "home" / "strangers")
    )


def test_a_shared_tokenizer_of_other_rules_than_a_given_models_is_refused(tmp_path, session):
    words = session.workspace.path("vocabulary")
    byte_level(words, CODE, merges=20)
    [fault] = expert_faults(session)
    assert fault.field == "domains.law.tokenizer"
    assert "symphony.segmentation" in fault.remedy
    session.recipe = recipe_of(tmp_path, segmentation="law")
    assert not list(expert_faults(session))
    session.recipe = recipe_of(tmp_path)
    save_pico_tokenizer(words)  # what the given model has
    assert not list(expert_faults(session))


def test_responses_that_are_not_told_are_said_before_the_models_are_united(session):
    told, untold = Encoded([5] * 9, 9, [False] * 4 + [True] * 5), Encoded([5] * 9, 9)
    for domain in session.recipe.domains:
        folder = session.workspace.path(f"corpora/{domain}/heldout")
        texts = [told, untold] if domain == "law" else [told]
        write_split(folder, texts, eos_id=0, vocabulary_size=96)
    assert not list(corpus_faults(session))
    evaluation = replace(session.recipe.evaluation, loss="responses")
    session.recipe = replace(session.recipe, evaluation=evaluation)
    [fault] = corpus_faults(session)
    assert "law/heldout" in fault.value
    assert "1 of its 2 documents do not say" in fault.remedy


class Run:
    """Of a stage whose pieces are finished; the stage is killed before it publishes."""

    stage = SimpleNamespace(label="{}".format)
    session = SimpleNamespace(log=print)

    def __init__(self, folder, recipe, item=""):
        self.recipe, self.item, self.out, self.folder = recipe, item, folder / "out", folder
        self.pieces = folder / "pieces"
        self.pieces.mkdir()
        self.out.mkdir()

    def path(self, artifact):
        return self.folder / "law"

    def device(self, kind):
        return "cpu"

    def run(self, pieces, kind):
        return {piece.name: self.finished(piece.name) for piece in pieces}


class OfFiles(Run):
    def finished(self, name):
        path = self.pieces / name
        path.write_text(name)
        return Done(path, {"tokens": {"law": 9}}, 0.0, 1.0, 0)


class OfFolders(Run):
    def finished(self, name):
        path = self.pieces / name
        path.mkdir()
        (path / "config.json").write_text(name)
        return Done(path, {}, 0.0, 1.0, 0)


def test_pairs_that_are_counted_are_there_still_when_their_stage_is_killed(tmp_path, session):
    run = OfFiles(tmp_path, session.recipe, "symphony")
    pairs.function(run)
    assert {path.name for path in run.pieces.iterdir()} == {"law-0000", "physics-0000"}
    made = {path.relative_to(run.out).as_posix(): path for path in run.out.rglob("*.safetensors")}
    assert set(made) == {"law/0000.safetensors", "physics/0000.safetensors"}
    assert made["law/0000.safetensors"].read_text() == "law-0000"


def test_models_that_are_lifted_are_there_still_when_their_stage_is_killed(
    tmp_path, session, monkeypatch
):
    from tasks.symphony import unified

    run = OfFolders(tmp_path, session.recipe)
    monkeypatch.setattr(unified, "merged_backbone", lambda *_, **__: tmp_path)
    united.function(run)
    names = list(session.recipe.domains)
    assert sorted(path.name for path in run.pieces.iterdir()) == names
    assert [(run.out / n / "config.json").read_text() for n in names] == names
    assert all((run.pieces / n / "config.json").is_file() for n in names)
