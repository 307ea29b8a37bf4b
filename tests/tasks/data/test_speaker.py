"""Whose tokenizer reads the texts, and what is said of those that do otherwise."""

import json
from dataclasses import replace

import pytest
from chat import CHATML, save_chat_tokenizer
from pico import save_pico

from infra.recipe.schema import Lineage, Recipe
from tasks.data.sources import _other_manners, _ruling, outside_faults
from tasks.data.tokenizer import speaker
from tasks.recipes import check, validate
from tests.tasks.data.test_texts import chats
from upcycle_core.backbone.form import common_forms
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import token_ids
from upcycle_core.corpora.config import Source

SPACED = CHATML.replace("<|im_end|>", " <|im_end|>")


@pytest.fixture
def models(tmp_path):
    """A seed without a chat template, and experts that were tuned on chats with two of them."""
    found = {}
    templates = {"base": None, "law": CHATML, "code": SPACED}
    for number, (name, template) in enumerate(templates.items()):
        found[name] = save_pico(tmp_path / name, seed=number, vocab_size=400)
        save_chat_tokenizer(found[name], "chatml", template=template)
    return found


def recipe_of(tmp_path, models, **changes) -> Recipe:
    domains = {
        name: {
            "expert": str(models[name]),
            "calibration": chats(tmp_path / f"{name}.jsonl", tag=name),
            "heldout": chats(tmp_path / f"{name}-heldout.jsonl", tag=f"{name} heldout"),
        }
        for name in ("law", "code")
    }
    values = {"name": "pico", "domains": domains, "seed_model": {"model": str(models["base"])}}
    values |= {section: {"sequence_length": 64} for section in ("statistics", "evaluation")}
    return validate(values | changes)


def test_chats_are_read_as_the_experts_read_them_though_the_seed_cannot(tmp_path, models):
    recipe = recipe_of(tmp_path, models)
    assert speaker(recipe) == "code"
    check(recipe, tmp_path)  # no fault
    assert speaker(recipe_of(tmp_path, models, backbone={"experts": ["law"]})) == "law"


def test_the_seed_s_is_that_of_what_is_trained_here(tmp_path, models):
    recipe = recipe_of(tmp_path, models)
    (tmp_path / "train.txt").write_text("some text\n")
    own = {"train": {"files": [str(tmp_path / "train.txt")]}}
    domains = {"law": {"expert": str(models["law"]), **own}, "music": own}
    mixed = recipe_of(tmp_path, models, domains=domains)
    assert speaker(mixed) == "law"  # the first whose backbone is averaged
    trained = recipe_of(tmp_path, models, domains={"law": own, "music": own})
    assert speaker(trained) == speaker(replace(recipe, domains={})) == "seed"


def test_a_model_that_is_built_upon_keeps_its_tokenizer(tmp_path, models):
    """The first that the pinned backbone averages rules, whatever comes or goes."""
    recipe = recipe_of(tmp_path, models)
    lineage = Lineage(pinned={"backbone": "1"}, backbone=("law", "code"))
    assert speaker(recipe) == "code"
    assert speaker(replace(recipe, lineage=lineage)) == "law"
    gone = Lineage(pinned={"backbone": "1"}, backbone=("music", "law"))
    built = replace(recipe, lineage=gone, seed_model=replace(recipe.seed_model, model=None))
    assert speaker(built) is None
    assert outside_faults(built, tmp_path / "cache") == []


def test_who_added_tokens_rules_template_and_all(tmp_path, models):
    recipe = recipe_of(tmp_path, models)
    given = {name: CheckpointReader(path) for name, path in models.items()}
    tokens = {name: token_ids(path) for name, path in models.items()}
    assert _ruling(common_forms(given, tokens), given, "code") == "code"
    tokenizer = models["law"] / "tokenizer.json"
    core = json.loads(tokenizer.read_text())
    core["added_tokens"].append({**core["added_tokens"][-1], "id": 399, "content": "<tool>"})
    tokenizer.write_text(json.dumps(core))
    assert outside_faults(recipe, tmp_path / "cache") == []
    tokens["law"] = token_ids(models["law"])
    assert _ruling(common_forms(given, tokens), given, "code") == "law"
    (models["law"] / "chat_template.jinja").unlink()
    refused = outside_faults(recipe, tmp_path / "cache")
    assert "chat_template = None: the tokenizer has none" in str(refused[0])


def without(directory, role):
    """Take a token's role out of all that a tokenizer says."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := directory / name).is_file():
            settings = json.loads(path.read_text())
            settings.pop(role, None)
            path.write_text(json.dumps(settings))


@pytest.mark.parametrize("in_chats", [True, False])
def test_what_the_reading_tokenizer_lacks_is_said_before_text_is_read(tmp_path, models, in_chats):
    """Reading real corpora takes hours; who does not read them may lack it."""
    always = {"corpus": {"bos": "always", "min_characters": 1}}
    without(models["base"], "eos_token")
    without(models["base"], "bos_token")
    recipe = recipe_of(tmp_path, models, **always)
    if not in_chats:
        (tmp_path / "a.txt").write_text("some text")
        (tmp_path / "b.txt").write_text("other text")
        text = {p: Source(files=(str(tmp_path / f"{p[0]}.txt"),)) for p in ("a", "b")}
        parts = {"calibration": text["a"], "heldout": text["b"]}
        domains = {"code": replace(recipe.domains["code"], **parts)}
        recipe = replace(recipe, domains=domains)
    assert outside_faults(recipe, tmp_path / "cache") == []
    without(models["code"], "eos_token")
    (fault,) = outside_faults(recipe, tmp_path / "cache")
    assert (fault.field, fault.value) == ("domains.code.expert", str(models["code"]))
    assert "no end-of-sequence token to put between documents; set its eos_token" in fault.remedy
    without(models["code"], "bos_token")
    _, fault = outside_faults(recipe, tmp_path / "cache")
    assert (fault.field, fault.value) == ("corpus.bos", "always")
    assert fault.remedy == (
        "the tokenizer of domains.code.expert has no beginning-of-sequence token; use auto or never"
    )
    (_,) = outside_faults(recipe_of(tmp_path, models), tmp_path / "cache")


def test_a_token_of_settings_alone_without_a_row_is_said_before_text_is_read(tmp_path, models):
    """A model that reads it fails when all texts are tokenised."""
    rows = len(token_ids(models["base"]).ids)
    for number, name in enumerate(models):
        save_pico(models[name], seed=number, vocab_size=rows)
        save_chat_tokenizer(models[name], "chatml")
        settings = json.loads((models[name] / "tokenizer_config.json").read_text())
        settings["eos_token"] = "<|turn_end|>"
        (models[name] / "tokenizer_config.json").write_text(json.dumps(settings))
    recipe = recipe_of(tmp_path, models)
    assert outside_faults(recipe, tmp_path / "cache") == []  # nobody reads it
    template = (models["code"] / "chat_template.jinja").read_text()
    (models["code"] / "chat_template.jinja").write_text(
        template.replace("'<|im_end|>'", "eos_token")
    )
    fault, *_ = outside_faults(recipe, tmp_path / "cache")
    assert fault.field == "domains.code.calibration: chat_template"
    assert f"'<|turn_end|>', id {rows}" in fault.remedy
    (fault,) = outside_faults(training_recipe(tmp_path, models), tmp_path / "cache")
    assert fault.field == "seed_model.model"


def training_recipe(tmp_path, models):
    """One expert is trained, on a text that the seed's tokenizer reads."""
    (tmp_path / "train.txt").write_text("some text\n")
    own = {"train": {"files": [str(tmp_path / "train.txt")]}}
    short = {"training": {"sequence_length": 64}}
    domains = {"law": own, "music": own}
    recipe = recipe_of(tmp_path, models, experts=short, domains=domains)
    return replace(recipe, domains={"law": recipe.domains["law"]})


def test_the_seed_s_tokenizer_is_named_where_it_reads(tmp_path, models):
    recipe = training_recipe(tmp_path, models)
    assert outside_faults(recipe, tmp_path / "cache") == []
    without(models["base"], "eos_token")
    (fault,) = outside_faults(recipe, tmp_path / "cache")
    assert fault.field == "seed_model.model"


def test_what_other_tokenizers_do_otherwise_is_said(models):
    tokenizer = models["law"] / "tokenizer.json"
    core = json.loads(tokenizer.read_text())
    core["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer.write_text(json.dumps(core))
    given = {name: CheckpointReader(path) for name, path in models.items()}
    found = _other_manners(given, "code")
    said = "its tokenizer's {} is another than that of code, whose the model has"
    assert found == {
        "base": [said.format("chat template")],
        "law": [said.format("chat template"), said.format("way to cut text")],
    }
    assert _other_manners({"law": given["law"]}, "law") == {}
