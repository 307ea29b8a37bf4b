"""What is pinned, which expert is whose parent, and what is refused; artifacts of a few bytes."""

import json
from dataclasses import replace

import pytest
from texts import pico_recipe

from infra.lineage import Lineage
from infra.reading import validate
from tasks.lineage import FILE, begin, modelled, save, with_lineage, with_parents, without_backbone
from tasks.pipeline import backbone, parents
from tasks.stage_run import Session
from tasks.workspace import Workspace
from upcycle_core.errors import InputError

DOMAINS = ("letters", "numbers")


def publish(workspace, artifact, text="weights", **inputs):
    staged = workspace.stage(artifact)
    (staged / "config.json").write_text(json.dumps(text))
    workspace.publish(staged, artifact, {"inputs": inputs, "fingerprint": text})
    return workspace.digest(artifact)


def write_corpus(workspace, domain, text):
    folder = workspace.path(f"corpora/{domain}/train")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokens.bin").write_text(text)
    return workspace.digest(f"corpora/{domain}/train")


@pytest.fixture
def recipe(tmp_path):
    return validate(pico_recipe(tmp_path, domains=DOMAINS))


@pytest.fixture
def workspace(tmp_path):
    """A built one: experts of both domains, and what hangs on them."""
    workspace = Workspace(tmp_path / "home" / "pico")
    publish(workspace, "tokenizer")
    publish(workspace, "seed")
    for domain in DOMAINS:
        text = write_corpus(workspace, domain, "old")
        publish(workspace, f"experts/{domain}", domain, **{f"corpora/{domain}/train": text})
    made_from = {f"experts/{d}": "0" for d in DOMAINS}
    publish(workspace, "backbone", **made_from)
    publish(workspace, "model", **made_from, backbone="1", router="2")
    return workspace


def test_a_lineage_pins_what_was_built(recipe, workspace):
    lineage = begin(recipe, workspace).lineage
    assert lineage.pinned == {n: workspace.digest(n) for n in ("tokenizer", "seed", "backbone")}
    assert lineage.backbone == DOMAINS
    assert modelled(workspace) == DOMAINS


def test_nothing_built_is_no_beginning(recipe, tmp_path):
    with pytest.raises(InputError, match=r"flows\.dume") as raised:
        begin(recipe, Workspace(tmp_path / "empty"))
    assert len(raised.value.faults) == 3


def test_it_is_part_of_the_recipe_of_whatever_runs_there(recipe, workspace):
    begun = begin(recipe, workspace)
    assert with_lineage(recipe, workspace) == recipe
    save(begun.lineage, workspace)
    assert with_lineage(recipe, workspace) == begun


def test_a_second_beginning_keeps_the_first(recipe, workspace):
    save(begin(recipe, workspace).lineage, workspace)
    first = workspace.digest("backbone")
    publish(workspace, "backbone", "another", **{"experts/letters": "0"})
    again = begin(recipe, workspace)
    assert again.pinned["backbone"] == first
    assert again.averaged == DOMAINS


def test_a_backbone_made_again_averages_all_domains(recipe, workspace):
    grown = replace(recipe, domains={**recipe.domains, "colours": recipe.domains["letters"]})
    begun = begin(grown, workspace)
    assert begun.averaged == DOMAINS
    rebuilt = without_backbone(begun)
    assert rebuilt.averaged == tuple(grown.domains)
    assert set(rebuilt.pinned) == {"tokenizer", "seed"}


def test_new_text_makes_the_expert_its_own_parent(recipe, workspace):
    begun = begin(recipe, workspace)
    expert = workspace.digest("experts/letters")
    assert not with_parents(begun, workspace, led=DOMAINS).parents
    write_corpus(workspace, "letters", "new")
    assert with_parents(begun, workspace, led=DOMAINS).parents == {"letters": expert}


def test_what_was_refused_is_no_parent(recipe, workspace):
    begun = begin(recipe, workspace)
    named = replace(begun, lineage=replace(begun.lineage, parents={"letters": "the champion's"}))
    write_corpus(workspace, "letters", "new")
    assert with_parents(named, workspace, led=()).parents == {"letters": "the champion's"}
    own = workspace.digest("experts/letters")
    assert with_parents(named, workspace, led=("letters",)).parents == {"letters": own}


def test_a_parent_of_a_domain_that_left_is_forgotten(recipe, workspace):
    begun = begin(recipe, workspace)
    named = replace(begun, lineage=replace(begun.lineage, parents={"colours": "1"}))
    assert not with_parents(named, workspace, led=()).parents


def test_what_is_pinned_is_current_until_it_is_another(recipe, workspace):
    session = Session(begin(recipe, workspace), workspace, log=print)
    assert backbone.is_current(session)
    (workspace.path("backbone") / "config.json").write_text("damaged")
    with pytest.raises(InputError, match="built upon and is not there as it was"):
        backbone.is_current(session)
    publish(workspace, "backbone", "another")
    with pytest.raises(InputError, match="built upon and is not there as it was"):
        backbone.ensure(session)


def test_a_parent_is_a_copy_of_the_expert_that_is_named(recipe, workspace):
    (workspace.path("experts/letters") / "notes.txt").write_text("no part of a checkpoint")
    expert = publish(workspace, "experts/letters", "weights")
    lineage = Lineage(parents={"letters": expert})
    session = Session(replace(recipe, lineage=lineage), workspace, log=lambda text: None)
    parents.ensure(session, "letters")
    assert json.loads((workspace.path("parents/letters") / "config.json").read_text()) == "weights"
    publish(workspace, "experts/letters", "a child")
    assert parents.is_current(session, "letters")  # the child may replace what it came from
    other = replace(recipe, lineage=Lineage(parents={"letters": "f00"}))
    with pytest.raises(InputError, match=r"lineage\.parents\.letters = 'f00'"):
        parents.ensure(Session(other, workspace, log=lambda text: None), "letters")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pinned": {}}'])
def test_a_damaged_lineage_is_said(recipe, workspace, text):
    (workspace.root / FILE).write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        with_lineage(recipe, workspace)
