"""Lives of models that are not DUME's: built, taught, grown, shrunk, taken back and restored."""

import json

import pytest
import test_simoe_flow as instructed
import test_symphony_flow as strangers
from pico import save_pico
from test_living_flow import Life, recipe_of, teach
from texts import WORDS, pico_recipe, save_recipe, write_texts

from upcycle_core.checkpoints.hashing import tree_digest

OLD, NEW = ("letters", "numbers"), "colours"
NAME = "upcycle-pico"


def trained_again(life, before):
    """Domains whose experts are other ones than before."""
    after = life.digests()
    weights = "model.safetensors"
    return {
        d
        for d in (*OLD, NEW)
        if after.get(f"experts/{d}/{weights}") != before.get(f"experts/{d}/{weights}")
    }


def taken_back_and_restored(life, folder, name=NAME):
    """Roll back one champion, and bring the newest version back from the remote; its workspace."""
    newest = life.registry().versions(name)[-1]
    life.registry().set_alias(newest, "champion")  # whatever the gate said of so little text
    before = life.registry().versions(name)[0]
    life.registry().set_tags(newest, {"upcycle.previous_champion": str(before.number)})
    said = life.call("flows.rollback", name, "--because", "a trial").stdout
    assert f"champion: {before.reference}" in said
    life.call("flows.restore", name, newest.number, "--into", folder)
    return folder / "pico"


def symphony_of(folder, texts, domains):
    """Two whose vocabulary is shared, and an anchor that is nowhere named."""
    values = strangers.recipe_values(texts)
    values["domains"] = pico_recipe(texts, domains=domains)["domains"]
    values["domains"]["numbers"]["origin"] = {"mixture": {"numbers": 3, "letters": 1}}
    del values["outside"], values["similarity"], values["symphony"]["segmentation"]
    return save_recipe(folder / f"{len(domains)}.yaml", values)


@pytest.mark.faults
def test_strangers_have_a_life(tmp_path):
    texts = write_texts(tmp_path / "texts")
    life = Life(tmp_path, symphony_of(tmp_path, texts, OLD), module="flows.symphony")
    life.call("flows.symphony", life.recipe)
    idle = life.call("flows.retrain", life.recipe)
    assert "nothing to do" in idle.stdout
    assert not idle.calls

    before = life.digests()
    teach(texts / "numbers")
    taught = life.call("flows.retrain", life.recipe)
    assert taught.calls["train"] == 1 + 1  # one model, and what is joined
    assert trained_again(life, before) == {"numbers"}
    assert set(life.lineage()["parents"]) == {"numbers"}
    assert life.lineage()["anchor"] == "letters"
    assert "Continued experts: numbers from" in taught.stdout

    before = life.digests()
    grown = life.call("flows.grow", symphony_of(tmp_path, texts, (*OLD, NEW)), NEW)
    assert grown.calls["train"] == 1 + 1
    assert grown.calls["train_tokenizer"] == 0
    assert trained_again(life, before) == {NEW}
    assert "The others are aligned to letters." in grown.stdout  # though colours is first now
    config = json.loads((life.workspace / "model" / "config.json").read_text())
    assert config["num_local_experts"] == 3
    words = {(life.workspace / "experts" / d / "tokenizer.json").read_bytes() for d in (*OLD, NEW)}
    assert len(words) == 1

    shrunk = life.call("flows.shrink", tmp_path / "3.yaml", NEW)
    assert shrunk.calls["train"] == 1
    assert not (life.workspace / "experts" / NEW).exists()
    again = taken_back_and_restored(life, tmp_path / "again")
    for part in ("model", "experts/letters", "vocabulary", "starts/symphony"):
        assert tree_digest(again / part) == tree_digest(life.workspace / part)
    assert (again / "lineage.json").read_bytes() == (life.workspace / "lineage.json").read_bytes()

    life.call("flows.symphony", life.recipe, "--rebuild")
    assert not (life.workspace / "lineage.json").exists()


def given_strangers(folder, texts, models):
    """Each domain's model begins with one that is given."""
    values = strangers.recipe_values(texts)
    domains = pico_recipe(texts, domains=tuple(models))["domains"]
    for name, model in models.items():
        domains[name]["origin"] = {"model": str(model)}
    del values["outside"], values["similarity"], values["symphony"]["segmentation"]
    del values["tokenizer"], values["seed_model"]
    return save_recipe(folder / f"{len(models)}.yaml", {**values, "domains": domains})


@pytest.mark.faults
def test_a_stranger_of_another_type_and_length_comes_and_trains_no_other_again(tmp_path):
    texts = write_texts(tmp_path / "texts")
    models = {
        name: save_pico(tmp_path / f"{name}-begins", seed=place, dtype="bfloat16")
        for place, name in enumerate(OLD)
    }
    life = Life(tmp_path, given_strangers(tmp_path, texts, models), module="flows.symphony")
    life.call("flows.symphony", life.recipe)
    before = life.digests()
    models[NEW] = save_pico(tmp_path / "begins", seed=5, max_position_embeddings=64)
    all_ = given_strangers(tmp_path, texts, models)
    grown = life.call("flows.grow", all_, NEW)
    assert grown.calls["train"] == 1 + 1
    assert trained_again(life, before) == {NEW}
    config = json.loads((life.workspace / "model" / "config.json").read_text())
    assert config["num_local_experts"] == 3
    assert config["max_position_embeddings"] == 64
    idle = life.call("flows.retrain", all_)
    assert "nothing to do" in idle.stdout
    teach(texts / "numbers")
    before = life.digests()
    taught = life.call("flows.retrain", all_)
    assert taught.calls["train"] == 1 + 1
    assert trained_again(life, before) == {"numbers"}


@pytest.mark.faults
def test_the_compressed_model_follows_its_model(tmp_path):
    texts = write_texts(tmp_path / "texts")
    codecs = {"codecs": {"rank-4": {"codec": "low_rank", "rank": 4}}, "tolerance": 90}
    extra = save_recipe(tmp_path / "compression.yaml", {"compression": codecs})
    grown_recipe = recipe_of(tmp_path, texts, (*OLD, NEW))
    life = Life(tmp_path, recipe_of(tmp_path, texts, OLD))

    def compressed():
        versions = life.registry().versions(f"{NAME}-ders")
        made = (life.workspace / "compression/model/README.md").read_text()
        return len(versions), all(f"{d}:" in made for d in life.lineage()["backbone"]), made

    add = ("--add", extra)
    life.call("flows.ders", life.recipe, extra)
    life.call("flows.retrain", life.recipe, *add)  # flows.ders registers the compressed one alone
    assert "nothing to do" in life.call("flows.retrain", life.recipe, *add).stdout
    teach(texts / "letters")
    taught = life.call("flows.retrain", life.recipe, *add)
    assert taught.calls["train"] == 1
    assert f"`models:/{NAME}-ders/2`" in taught.stdout
    grown = life.call("flows.grow", grown_recipe, NEW, *add)
    assert grown.calls["train"] == 1
    assert f"`models:/{NAME}-ders/3`" in grown.stdout
    assert "colours" in compressed()[2]
    shrunk = life.call("flows.shrink", grown_recipe, NEW, *add)
    assert not shrunk.calls["train"]
    assert compressed()[0] == 4
    again = taken_back_and_restored(life, tmp_path / "again")
    assert tree_digest(again / "compression") == tree_digest(life.workspace / "compression")


def simoe_of(folder, texts, *sets):
    values = instructed.recipe_values(texts)
    files = {name: {"files": [f"{{folder}}/{name}.jsonl"]} for name in sets}
    values["instructions"]["sources"] = files
    return save_recipe(folder / f"{len(sets)}.yaml", values)


def write_colours(file):
    """Instructions of a domain that no other set has."""
    words = WORDS[NEW]
    rows = [(words[i % 12], words[(i * 5 + 1) % 12], words[(i * 7 + 2) % 12]) for i in range(40)]
    lines = [
        {"category": "last", "task": "last-colours", "domain": NEW, "response": row[-1]}
        | {"prompt": f"last: {' '.join(row)} {i}"}
        for i, row in enumerate(rows)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.faults
def test_a_tuned_model_has_a_life(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=OLD)
    instructed.write_instructions(texts / "asks.jsonl")
    write_colours(texts / "more.jsonl")
    one = simoe_of(tmp_path, texts, "asks")
    two = simoe_of(tmp_path, texts, "asks", "more")
    life = Life(tmp_path, one, module="flows.simoe")
    life.call("flows.simoe", one)
    idle = life.call("flows.retrain", one)
    assert "nothing to do" in idle.stdout
    assert not idle.calls
    seed = tree_digest(life.workspace / "seed")

    def tuned_once(done):
        assert (done.calls["train_simoe"], done.calls["train"]) == (1, 0), done.calls
        assert tree_digest(life.workspace / "seed") == seed
        assert "exact_match_unseen" in done.stdout

    with (texts / "asks.jsonl").open("a") as file:
        line = {"category": "copy", "task": "copy-letters", "domain": "letters"}
        file.write(json.dumps({**line, "prompt": "copy: mu nu", "response": "mu nu"}) + "\n")
    teach(texts / "letters")  # the seed stays, whatever becomes of its text
    tuned_once(life.call("flows.retrain", one))
    tuned_once(life.call("flows.grow", two, "more"))
    assert "nothing to do" in life.call("flows.retrain", two).stdout
    labels = life.workspace / "instructions" / "train"
    assert (labels / f"{NEW}.jsonl").exists()
    tuned_once(life.call("flows.shrink", two, "more"))
    assert not (labels / f"{NEW}.jsonl").exists()
    assert len(life.registry().versions(NAME)) == 4
    again = taken_back_and_restored(life, tmp_path / "again")
    for part in ("model", "seed", "instructions"):
        assert tree_digest(again / part) == tree_digest(life.workspace / part)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    texts = write_texts(tmp_path_factory.mktemp("texts"))
    instructed.write_instructions(texts / "asks.jsonl")
    return texts


def test_what_a_method_cannot_do_is_said_in_one_line(tmp_path, texts):
    recipe, tuned = symphony_of(tmp_path, texts, (*OLD, NEW)), simoe_of(tmp_path, texts, "asks")
    life = Life(tmp_path, recipe)

    def said(recipe, module, *arguments):
        text = life.refused(*arguments, recipe=recipe, module=module)
        assert text.count("\n") == 1
        return text

    for module in ("flows.grow", "flows.shrink"):
        assert "keeps no average of experts: leave it out; all anew: flows.symphony" in said(
            recipe, module, NEW, "--rebuild"
        )
        assert "holds no model; run flows.symphony" in said(recipe, module, NEW)
    assert "holds no model; run flows.simoe" in said(tuned, "flows.retrain")
    assert "is not what flows.dume makes; run flows.simoe" in said(tuned, "flows.dume")
    text = life.refused("asks", recipe=tuned, module="flows.shrink")  # the last one
    assert "instructions.sources" in text
