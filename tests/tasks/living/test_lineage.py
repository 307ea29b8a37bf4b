"""What is pinned, which expert is whose parent, and what is refused; artifacts of a few bytes."""

import json
import shutil
from dataclasses import replace

import pytest
from pico import save_pico
from texts import pico_recipe, write_texts

from infra.recipe.schema import Lineage, resolve
from tasks.data.seed import seed
from tasks.data.sources import sources
from tasks.dume.backbone import averaged, backbone
from tasks.dume.experts import parents
from tasks.engine.stage_run import Session
from tasks.engine.workspace import Workspace
from tasks.living.freshness import news
from tasks.living.lineage import (
    FILE,
    averaged_in,
    begin,
    check_built_upon,
    modelled,
    save,
    settle,
    with_lineage,
    with_parents,
    without_backbone,
)
from tasks.recipes import validate
from upcycle_core.errors import InputError

DOMAINS = ("letters", "numbers")


def publish(workspace, artifact, text="weights", *, params=None, **inputs):
    staged = workspace.stage(artifact)
    (staged / "config.json").write_text(json.dumps(text))
    (staged / "model.safetensors").write_bytes(b"")
    workspace.publish(
        staged, artifact, {"inputs": inputs, "params": params or {}, "fingerprint": text}
    )
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
    seed = publish(workspace, "seed", tokenizer=publish(workspace, "tokenizer"))
    experts = {}
    for domain in DOMAINS:
        text = {f"corpora/{domain}/train": write_corpus(workspace, domain, "old")}
        name = f"experts/{domain}"
        experts[name] = publish(workspace, name, domain, seed=seed, **text)
    backbone = publish(workspace, "backbone", **experts)
    publish(workspace, "model", **experts, backbone=backbone, router="2")
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


@pytest.mark.parametrize("artifact", ["tokenizer", "seed", "experts/letters", "backbone"])
def test_a_build_that_did_not_end_is_no_beginning(recipe, workspace, artifact):
    publish(workspace, artifact, "made anew, and what hangs on it was not")
    with pytest.raises(InputError, match=rf"made from another {artifact}: .* flows\.dume"):
        begin(recipe, workspace)


def test_a_model_whose_record_is_cut_off_is_none(workspace):
    record = workspace.path("model") / "provenance.json"
    record.write_text(record.read_text()[:20])
    assert modelled(workspace) == ()


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
    assert averaged(again) == DOMAINS


def test_a_backbone_made_again_averages_all_domains(recipe, workspace):
    grown = replace(recipe, domains={**recipe.domains, "colours": recipe.domains["letters"]})
    begun = begin(grown, workspace)
    assert averaged(begun) == DOMAINS
    rebuilt = without_backbone(begun)
    assert averaged(rebuilt) == tuple(grown.domains)
    assert set(rebuilt.pinned) == {"tokenizer", "seed"}


def test_what_a_killed_rebuild_has_averaged_is_not_built_upon(recipe, workspace):
    """The model lacks the domain that came, and its nights must not take up a backbone with it."""
    grown = replace(recipe, domains={**recipe.domains, "colours": recipe.domains["letters"]})
    save(without_backbone(begin(grown, workspace)).lineage, workspace)
    assert averaged(begin(recipe, workspace)) == DOMAINS  # killed before it was averaged
    assert averaged_in(workspace) == DOMAINS
    inputs = {f"experts/{name}": workspace.digest(f"experts/{name}") for name in DOMAINS}
    colours = publish(workspace, "experts/colours", "colours")
    publish(workspace, "backbone", "of three", **inputs, **{"experts/colours": colours})
    night = begin(recipe, workspace)
    assert set(night.pinned) == {"tokenizer", "seed"}
    assert averaged(night) == DOMAINS
    assert averaged_in(workspace) == ()
    publish(workspace, "backbone", "of two again", **inputs)
    publish(workspace, "model", "again", **inputs, backbone=workspace.digest("backbone"))
    settled = settle(night, workspace)
    assert settled.pinned["backbone"] == workspace.digest("backbone")
    assert averaged(settled) == DOMAINS
    assert settle(settled, workspace) == settled


def test_new_text_makes_the_expert_its_own_parent(recipe, workspace):
    begun = begin(recipe, workspace)
    expert = workspace.digest("experts/letters")
    led = {"letters": {expert[:16]}}
    assert not with_parents(begun, workspace, led=led).parents
    write_corpus(workspace, "letters", "new")
    assert with_parents(begun, workspace, led=led).parents == {"letters": expert}


def test_what_was_refused_is_no_parent(recipe, workspace):
    begun = begin(recipe, workspace)
    named = replace(begun, lineage=replace(begun.lineage, parents={"letters": "the champion's"}))
    write_corpus(workspace, "letters", "new")
    led = {"letters": {"the champion's"}}
    assert with_parents(named, workspace, led=led).parents == {"letters": "the champion's"}
    own = workspace.digest("experts/letters")
    led["letters"].add(own)
    assert with_parents(named, workspace, led=led).parents == {"letters": own}


def test_where_no_version_is_known_the_expert_that_is_there_goes_on(recipe, workspace):
    """A home that was restored has the champion's expert, and an empty registry."""
    begun = begin(recipe, workspace)
    named = replace(begun, lineage=replace(begun.lineage, parents={"letters": "before"}))
    write_corpus(workspace, "letters", "new")
    own = workspace.digest("experts/letters")
    assert with_parents(named, workspace, led=None).parents == {"letters": own}
    assert with_parents(named, workspace, led={}).parents == {"letters": "before"}


def test_where_the_champion_s_expert_is_gone_none_is_continued(recipe, workspace):
    begun = begin(recipe, workspace)
    named = replace(begun, lineage=replace(begun.lineage, parents={"letters": "rolled back too"}))
    write_corpus(workspace, "letters", "new")
    with pytest.raises(InputError, match=rf"flows\.restore {recipe.registered_name} champion"):
        with_parents(named, workspace, led={"letters": {"the champion's"}})
    own = with_parents(begun, workspace, led={"letters": {"the champion's"}}).parents
    assert own == {"letters": workspace.digest("experts/letters")}  # made anew, by other settings
    others = with_parents(named, workspace, led={"numbers": {"the champion's"}}).parents
    assert others == {"letters": "rolled back too"}  # no champion knew letters


def test_a_parent_that_a_stopped_shrinking_has_forgotten_is_known_again(recipe, workspace):
    """Else the expert would be trained again, from the seed."""
    params = {"lineage.parents.letters": "the first"}
    parent = {"parents/letters": publish(workspace, "parents/letters", params=params)}
    text = {"corpora/letters/train": workspace.digest("corpora/letters/train")}
    digest = publish(workspace, "experts/letters", "continued", **parent, **text)
    experts = {f"experts/{domain}": workspace.digest(f"experts/{domain}") for domain in DOMAINS}
    publish(workspace, "backbone", **experts)
    publish(workspace, "model", **experts)
    begun = begin(recipe, workspace)
    named = replace(begun, lineage=replace(begun.lineage, parents={"letters": "the first"}))
    left = {name: own for name, own in named.domains.items() if name != "letters"}
    save(named.lineage, workspace)
    save(with_lineage(replace(recipe, domains=left), workspace).lineage, workspace)  # and killed
    again = begin(recipe, workspace)
    assert with_parents(again, workspace, led={}).parents == {"letters": "the first"}
    write_corpus(workspace, "letters", "new")
    for led, parent in ((digest, digest), ("the first", "the first")):
        led_experts = {"letters": {led}}
        assert with_parents(again, workspace, led=led_experts).parents == {"letters": parent}


def test_experts_of_a_model_that_was_lost_are_continued(recipe, workspace):
    """Who deletes its files to make room loses what is put together in minutes, not months."""
    params = {"lineage.parents.letters": "the first"}
    parent = {"parents/letters": publish(workspace, "parents/letters", params=params)}
    text = {"corpora/letters/train": workspace.digest("corpora/letters/train")}
    digest = publish(workspace, "experts/letters", "continued", **parent, **text)
    lineage = Lineage(pinned={"seed": workspace.digest("seed")}, parents={"letters": "the first"})
    lost = replace(recipe, lineage=lineage)
    shutil.rmtree(workspace.path("model"))
    led = {"letters": {digest}}
    assert with_parents(lost, workspace, led=led).parents == {"letters": "the first"}
    write_corpus(workspace, "letters", "new")
    assert with_parents(lost, workspace, led=led).parents == {"letters": digest}


def test_text_that_was_taken_back_leaves_the_expert_as_it_was(recipe, workspace):
    begun = begin(recipe, workspace)
    own = workspace.digest("experts/letters")
    failed = replace(begun, lineage=replace(begun.lineage, parents={"letters": own}))
    assert not with_parents(failed, workspace, led={"letters": {own}}).parents


def test_a_parent_of_a_domain_that_left_is_forgotten(recipe, workspace):
    begun = begin(recipe, workspace)
    parents = {"colours": "1", "letters": "2"}
    save(replace(begun.lineage, parents=parents), workspace)
    assert begin(recipe, workspace).parents == {"letters": "2"}
    assert not begin(recipe, workspace, new=["letters"]).parents


def test_what_is_pinned_is_current_until_it_is_another(recipe, workspace):
    session = Session(begin(recipe, workspace), workspace, log=print)
    assert backbone.is_current(session)
    (workspace.path("backbone") / "config.json").write_text("damaged")
    with pytest.raises(InputError, match="built upon and is not there as it was"):
        backbone.is_current(session)
    publish(workspace, "backbone", "another")
    with pytest.raises(InputError, match="built upon and is not there as it was"):
        backbone.ensure(session)


def test_another_setting_of_what_is_built_upon_is_said(recipe, workspace):
    values = resolve(recipe)
    made_by = {"seed": values["seed"], "seed_model": values["seed_model"], "compute.seed": {}}
    older = json.loads(json.dumps(made_by))
    del older["seed_model"]["training"]["warmup_steps"]  # what an older version did not know
    staged = workspace.stage("seed")
    workspace.publish(staged, "seed", {"inputs": {}, "params": older})
    begun = replace(recipe, lineage=Lineage(pinned={"seed": workspace.digest("seed")}))

    def is_current(asked):
        return seed.is_current(Session(asked, workspace, log=print))

    assert is_current(begun)
    often = replace(begun.seed_model.training, log_steps=12_345)
    assert is_current(replace(begun, seed_model=replace(begun.seed_model, training=often)))
    training = replace(begun.seed_model.training, steps=12_345, warmup_steps=3)
    with pytest.raises(
        InputError, match=r"seed_model\.training\.steps = '?12345.*--rebuild"
    ) as said:
        is_current(replace(begun, seed_model=replace(begun.seed_model, training=training)))
    assert len(said.value.faults) == 1


def test_another_given_seed_than_is_built_upon_is_said_until_it_is_put_back(tmp_path):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    bases = {name: save_pico(tmp_path / name, seed=n) for n, name in enumerate(("v1", "v2"))}
    workspace = Workspace(tmp_path / "home" / "pico")

    lines = []

    def session(model, **lineage):
        recipe = validate({**values, "seed_model": {"model": str(model)}})
        return Session(replace(recipe, **lineage), workspace, log=lines.append)

    sources.ensure(session(bases["v1"]))
    made_of = {"sources/seed.json": workspace.digest("sources/seed.json")}
    named = {"seed_model.model": str(bases["v1"])}
    pinned = {"seed": publish(workspace, "seed", params=named, **made_of)}
    begun = {"lineage": Lineage(pinned=pinned)}
    moved = tmp_path / "moved"
    bases["v1"].rename(moved)
    assert not news(session(moved, **begun)).any
    said = r"seed_model\.model = .*v2.*: is another seed.* built upon, .*v1'; .*--rebuild"
    for look in (news, sources.ensure):
        with pytest.raises(InputError, match=said):
            look(session(bases["v2"], **begun))
    assert news(session(bases["v2"])).any
    assert not news(session(moved, **begun)).any  # what was refused was not published
    moved.rename(bases["v1"])
    lines.clear()
    (bases["v1"] / "README.md").write_text("A word more.")
    sources.ensure(session(bases["v1"], **begun))
    assert "v1 has other files now than the seed that is built upon was made of" in str(lines)
    begun = {"lineage": Lineage(pinned={"seed": publish(workspace, "seed")})}  # of an older version
    assert news(session(bases["v2"], **begun)).any


@pytest.mark.parametrize("recorded", [{}, {"backbone.merge.head": "fitted"}])
def test_another_merge_of_what_is_built_upon_is_said_before_experts_are_trained(
    recipe, workspace, recorded
):
    staged = workspace.stage("backbone")
    workspace.publish(staged, "backbone", {"inputs": {}, "params": recorded})
    begun = replace(recipe, lineage=Lineage(pinned={"backbone": workspace.digest("backbone")}))
    before = recorded.get("backbone.merge.head", "average")
    for head in ("average", "fitted"):
        merge = replace(begun.backbone.merge, embeddings="average", head=head)
        asked = replace(begun, backbone=replace(begun.backbone, merge=merge))
        session = Session(asked, workspace, log=print)
        if head == before:
            check_built_upon(session)
        else:
            said = f"merge.head = '?{head}.*made with '{before}'; put that back.*--rebuild"
            with pytest.raises(InputError, match=said):
                check_built_upon(session)


def test_a_parent_is_a_copy_of_the_expert_that_is_named(recipe, workspace):
    (workspace.path("experts/letters") / "notes.txt").write_text("no part of a checkpoint")
    expert = publish(workspace, "experts/letters", "weights")
    lineage = Lineage(parents={"letters": expert})
    session = Session(replace(recipe, lineage=lineage), workspace, log=lambda text: None)
    parents.ensure(session, "letters")
    assert json.loads((workspace.path("parents/letters") / "config.json").read_text()) == "weights"
    publish(workspace, "experts/letters", "a child")
    assert parents.is_current(session, "letters")  # the child may replace what it came from
    shutil.rmtree(workspace.path("parents/letters"))
    digest = workspace.digest("experts/letters")
    (workspace.path("experts/letters") / "config.json").write_text("damaged")
    child = replace(recipe, lineage=Lineage(parents={"letters": digest}))
    with pytest.raises(InputError, match="not in the workspace as it was"):
        parents.ensure(Session(child, workspace, log=lambda text: None), "letters")
    other = replace(recipe, lineage=Lineage(parents={"letters": "f00"}))
    with pytest.raises(InputError, match=r"lineage\.parents\.letters = 'f00'"):
        parents.ensure(Session(other, workspace, log=lambda text: None), "letters")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pinned": {}}'])
def test_a_damaged_lineage_is_said(recipe, workspace, text):
    (workspace.root / FILE).write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        with_lineage(recipe, workspace)
