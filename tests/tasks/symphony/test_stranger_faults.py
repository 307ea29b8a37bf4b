"""What speaks against joining given models, found from their files before any weight is used."""

import json
import shutil

import pytest
from chat import save_chat_tokenizer
from pico import save_pico, save_pico_tokenizer
from texts import TRAINING
from vocabularies import CODE, NATURE, byte_level

from tasks.recipes import check, validate
from tasks.symphony.sources import _shaped
from tasks.symphony.vocabulary import vocabulary
from tests.tasks.data.test_texts import chats
from upcycle_core.architectures.compare import MUST_AGREE
from upcycle_core.architectures.families import family_of
from upcycle_core.errors import InputError
from upcycle_core.training.config import LlamaShape
from upcycle_core.training.seed import initialise_model

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers": 2,
    "attention_heads": 4,
    "key_value_heads": 2,
    "max_positions": 128,
    "tie_embeddings": False,
}
"""That of a pico model."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models that fit each other, with their own texts and the same tokenizer."""
    folder = tmp_path_factory.mktemp("strangers")
    for number, name in enumerate(("code", "law")):
        save_pico(folder / name, seed=number)
    for name in ("code", "law", "physics", "tax"):
        text = f"text of some length on {name}\n<|doc|>\nmore of it\n"
        (folder / f"{name}.txt").write_text(text * 20)
    return folder


def recipe_of(folder, **experts):
    experts = {"code": folder / "code", "law": folder / "law", **experts}
    return {
        "name": "strangers",
        "domains": {
            name: {"expert": str(path), "train": {"files": [str(folder / f"{name}.txt")]}}
            for name, path in experts.items()
        },
        "symphony": {"calibration": {"sequence_length": 32}},
        "evaluation": {"sequence_length": 32},
        "moe": {"top_k": 2},
    }


def faults_of(values, home):
    with pytest.raises(InputError) as error:
        check(validate(values), home)
    return {fault.field: fault.remedy for fault in error.value.faults}


def test_models_that_fit_pass(models, tmp_path):
    check(validate(recipe_of(models)), tmp_path)


def test_every_difference_of_every_model_is_in_one_message(models, tmp_path):
    save_pico(tmp_path / "wide", seed=2, hidden_size=64, intermediate_size=96)
    save_pico(tmp_path / "deep", seed=3, num_hidden_layers=3, hidden_act="gelu")
    values = recipe_of(models, physics=tmp_path / "wide", tax=tmp_path / "deep")
    found = faults_of(values, tmp_path)
    assert {
        "domains.physics.expert.config.hidden_size",
        "domains.physics.expert.config.intermediate_size",
        "domains.tax.expert.config.num_hidden_layers",
        "domains.tax.expert.config.hidden_act",
    } <= set(found)


def test_a_model_that_is_given_twice_is_named(models, tmp_path):
    shutil.copytree(models / "law", tmp_path / "copy")
    found = faults_of(recipe_of(models, tax=tmp_path / "copy"), tmp_path)
    assert any(field.startswith("domains.tax.expert") for field in found)


def test_training_goes_on_from_no_model_without_an_end_token(models, tmp_path):
    save_pico(tmp_path / "endless", seed=5)
    path = tmp_path / "endless" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["eos_token"]
    path.write_text(json.dumps(settings))
    values = recipe_of(models)
    domain = values["domains"]["law"]
    domain["origin"] = {"model": str(tmp_path / "endless")}
    del domain["expert"]
    found = faults_of(values, tmp_path)
    assert "set its eos_token" in found["domains.law.origin.model"]


def test_each_model_without_a_token_to_begin_texts_with_is_named(models, tmp_path):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := models / "law" / name).is_file():
            settings = json.loads(path.read_text())
            settings.pop("bos_token", None)
            path.write_text(json.dumps(settings))
    values = recipe_of(models)
    check(validate(values), tmp_path)
    values["corpus"] = {"bos": "always"}
    found = faults_of(values, tmp_path)
    assert found == {
        "corpus.bos": "the tokenizer of domains.law.expert has no beginning-of-sequence token; "
        "use auto or never"
    }


def test_other_merge_rules_ask_whose_segmentation_the_result_has(models, tmp_path):
    for name, text in (("one", NATURE), ("other", CODE)):
        byte_level(tmp_path / f"{name}.tokenizer", text, merges=20)
        tokens = json.loads((tmp_path / f"{name}.tokenizer/tokenizer.json").read_text())
        size = max(tokens["model"]["vocab"].values()) + 2
        save_pico(tmp_path / name, seed=len(name), vocab_size=size)
        shutil.copytree(tmp_path / f"{name}.tokenizer", tmp_path / name, dirs_exist_ok=True)
    values = recipe_of(models, code=tmp_path / "one", law=tmp_path / "other")
    found = faults_of(values, tmp_path)
    assert [remedy for remedy in found.values() if "symphony.segmentation" in remedy]
    values["symphony"]["segmentation"] = "code"
    check(validate(values), tmp_path)


def test_responses_are_scored_where_all_models_have_one_tokenizer(tmp_path):
    """Before any is joined: what each makes of the others' responses is not compared."""
    values = recipe_of(tmp_path)
    for number, (name, domain) in enumerate(values["domains"].items()):
        save_pico(tmp_path / name, seed=number, vocab_size=400, max_position_embeddings=1024)
        save_chat_tokenizer(tmp_path / name, "chatml")
        domain["train"] = chats(tmp_path / f"{name}.jsonl", tag=name)
        domain["heldout"] = chats(tmp_path / f"{name}-heldout.jsonl", tag=f"{name} held out")
    values["evaluation"] = {"loss": "responses"}
    check(validate(values), tmp_path)
    save_chat_tokenizer(tmp_path / "law", "llama3")
    values["symphony"] = {"segmentation": "code"}
    found = faults_of(values, tmp_path)
    assert "domains.law.expert has another tokenizer" in found["evaluation.loss"]
    assert "use all" in found["evaluation.loss"]
    values["evaluation"] = {"loss": "all"}
    check(validate(values), tmp_path)


def test_responses_are_not_scored_where_tokenizers_are_trained_here(models, tmp_path):
    values = recipe_of(models)
    values["domains"] |= {name: {"train": chats(tmp_path / name)} for name in ("physics", "tax")}
    for name in ("code", "law"):
        values["domains"][name]["heldout"] = values["domains"]["tax"]["train"]
    values |= {"symphony": {"segmentation": "code"}, "evaluation": {"loss": "responses"}}
    assert "physics" in faults_of(values, tmp_path)["evaluation.loss"]
    del values["domains"]["code"], values["domains"]["law"]
    values["symphony"] = {}
    assert "evaluation.loss" not in faults_of(values, tmp_path)  # they share one
    values["domains"]["tax"]["origin"] = {"vocabulary_size": 300}
    values["symphony"] = {"segmentation": "tax"}
    assert "tax" in faults_of(values, tmp_path)["evaluation.loss"]


def test_a_given_model_must_fit_those_that_are_trained_here(models, tmp_path):
    values = recipe_of(models)
    values["domains"]["tax"] = {"train": values["domains"]["law"]["train"], "origin": {}}
    values["symphony"]["segmentation"] = "code"
    found = faults_of(values, tmp_path)
    assert "seed_model.shape has 128" in found["domains.code.expert.config.hidden_size"]


@pytest.fixture
def beside(models):
    """A given model beside one that is trained here, of its shape; both cut text as the first."""
    values = recipe_of(models)
    law = values["domains"]["law"]
    values["domains"]["law"] = {"train": law["train"]}
    values["symphony"]["segmentation"] = "code"
    values["experts"] = {"training": {**TRAINING, "steps": 4}}
    values["seed_model"] = {"shape": dict(SHAPE)}
    return values


def test_a_model_that_is_trained_here_may_stand_beside_a_given_one_of_its_shape(beside, tmp_path):
    check(validate(beside), tmp_path)


def test_a_tokenizer_of_its_own_beside_a_given_model_s_asks_whose_rules_count(beside, tmp_path):
    """After training there would be no more to be done about it."""
    beside["domains"]["law"]["origin"] = {"vocabulary_size": 300}
    check(validate(beside), tmp_path)
    del beside["symphony"]["segmentation"]
    with pytest.raises(InputError) as error:
        validate(beside)
    assert [fault.field for fault in error.value.faults] == ["symphony.segmentation"]


@pytest.mark.parametrize(
    ("name", "value", "attribute"),
    [
        ("tie_embeddings", True, "tie_word_embeddings"),
        ("max_positions", 256, "max_position_embeddings"),
        ("rope_theta", 500.0, "rope_parameters"),
        ("attention_heads", 2, "head_dim"),
    ],
)
def test_all_that_models_must_agree_in_is_asked_before_any_is_trained(
    beside, tmp_path, name, value, attribute
):
    beside["seed_model"]["shape"][name] = value
    found = faults_of(beside, tmp_path)
    assert f"domains.code.expert.config.{attribute}" in found
    if name != "attention_heads":
        assert set(found) == {f"domains.code.expert.config.{attribute}"}
        assert f"set seed_model.shape.{name}" in found[f"domains.code.expert.config.{attribute}"]


def test_what_no_shape_can_say_asks_for_other_models(beside, tmp_path):
    save_pico(tmp_path / "other", seed=4, rms_norm_eps=1e-5)
    beside["domains"]["code"]["expert"] = str(tmp_path / "other")
    found = faults_of(beside, tmp_path)
    assert list(found) == ["domains.code.expert.config.rms_norm_eps"]
    assert "which no recipe changes" in found["domains.code.expert.config.rms_norm_eps"]


def test_given_models_are_held_against_a_shape_as_they_will_be(beside, models, tmp_path):
    """The shortest length counts for all of them, and one head that is not tied."""
    save_pico(tmp_path / "long", seed=5, max_position_embeddings=512, tie_word_embeddings=True)
    beside["domains"]["physics"] = {
        "expert": str(tmp_path / "long"),
        "train": {"files": [str(models / "physics.txt")]},
    }
    check(validate(beside), tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_shape_is_what_models_of_it_say(tmp_path, family):
    shape = LlamaShape(**SHAPE, family=family)
    save_pico_tokenizer(tmp_path / "tokenizer")
    initialise_model(shape, tmp_path / "tokenizer", tmp_path / "model", seed=0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    full = family_of(config).resolve(config)
    assert _shaped(shape) | {"vocab_size": full["vocab_size"]} == {
        name: full.get(name) for name in ("model_type", *MUST_AGREE)
    }


def test_a_ready_model_without_training_text_has_no_part_in_a_shared_vocabulary(beside):
    """Which models that are trained here share; a ready one need not say what it was trained on."""
    text = beside["domains"]["code"].pop("train")
    beside["domains"]["code"] |= {"calibration": text, "heldout": text}
    recipe = validate(beside)
    assert list(vocabulary.inputs(recipe, "")) == ["documents/law/train.parquet"]
