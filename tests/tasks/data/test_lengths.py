"""Sequences are no longer than what given models were made for."""

from dataclasses import replace

import pytest
from forms import change_json
from pico import save_pico
from texts import TRAINING, write_texts

from infra.recipe.schema import Lineage
from tasks.data import sources
from tasks.data.lengths import positions
from tasks.recipes import validate
from tasks.symphony import sources as strangers

DOMAINS = ("letters", "numbers")
EXPERT = {"max_position_embeddings": 64}


@pytest.fixture
def values(tmp_path):
    """A given seed of 128 positions, and two given experts, one of which has 64."""
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    for seed, (name, more) in enumerate({"seed": {}, "letters": EXPERT, "numbers": {}}.items()):
        save_pico(tmp_path / name, seed=seed, **more)
    splits = {"train": "train", "calibration": "elsewhere", "heldout": "heldout"}
    return {
        "name": "pico",
        "seed_model": {"model": str(tmp_path / "seed")},
        "domains": {
            domain: {
                "expert": str(tmp_path / domain),
                **{s: {"files": [f"{texts}/{domain}/{f}.txt"]} for s, f in splits.items()},
            }
            for domain in DOMAINS
        },
        "statistics": {"sequence_length": 64},
        "evaluation": {"sequence_length": 64},
    }


def said(values, tmp_path, look=sources.model_faults):
    return [str(fault) for fault in look(validate(values), tmp_path / "models")]


def too_long(where, length, limit=64, field="domains.letters.expert"):
    remedy = f"longer than the {limit} positions of {field}; shorten it"
    return f"{where}.sequence_length = {length}: {remedy}"


def test_the_smallest_of_the_given_models_counts(values, tmp_path):
    assert said(values, tmp_path) == []
    values["evaluation"]["sequence_length"] = values["statistics"]["sequence_length"] = 65
    expected = [too_long("statistics", 65), too_long("evaluation", 65)]
    assert said(values, tmp_path) == expected
    change_json(tmp_path / "letters" / "config.json", max_position_embeddings=128)
    assert said(values, tmp_path) == []


def test_a_tied_head_is_not_merged_by_itself(values, tmp_path):
    def refused(**merge):
        recipe = validate({**values, "backbone": {"merge": merge}})
        found = sources.model_faults(recipe, tmp_path / "models")
        return [fault.field for fault in found]

    assert refused(head="counts") == []  # it has a head of its own
    for seed, name in enumerate(("seed", *DOMAINS)):
        save_pico(tmp_path / name, seed=seed, tie_word_embeddings=True, **EXPERT)
    assert refused(head="counts") == ["backbone.merge.head"]
    assert refused(head="counts", embeddings="counts") == []
    for domain in values["domains"].values():
        del domain["expert"]
    values["experts"] = {"training": {**TRAINING, "steps": 5, "sequence_length": 32}}
    values["seed_model"] = {"training": TRAINING, "shape": {"tie_embeddings": True}}
    assert refused(head="counts") == ["backbone.merge.head"]
    values["seed_model"]["shape"] = {"tie_embeddings": False}
    assert refused(head="counts") == []


def test_what_was_made_with_its_lengths_goes_on_with_them(values, tmp_path):
    values["statistics"]["sequence_length"] = 65
    recipe = validate(values)
    assert sources.model_faults(recipe, tmp_path / "models")
    begun = replace(recipe, lineage=Lineage())
    assert not sources.model_faults(begun, tmp_path / "models")


def test_trainings_count_where_something_is_trained(values, tmp_path):
    training = {**TRAINING, "steps": 5, "sequence_length": 200}
    values["experts"] = {"training": training, "continued": {**training, "sequence_length": 300}}
    assert said(values, tmp_path) == []
    values["baselines"] = {"btx": {"method": "btx", "training": training}}
    assert said(values, tmp_path) == [too_long("baselines.btx.training", 200)]
    del values["domains"]["letters"]["expert"]
    common = {"limit": 128, "field": "domains.numbers.expert"}
    assert said(values, tmp_path) == [
        too_long("experts.training", 200, **common),
        too_long("baselines.btx.training", 200, **common),
        too_long("experts.continued", 300, **common),
    ]


def test_instructions_are_tuned_on_a_seed_without_statistics(values, tmp_path):
    values["statistics"]["sequence_length"] = 1024
    recipe, look = validate(values), sources.outside_faults
    assert look(recipe, tmp_path / "models", lengths=["seed_model.training"]) == []


def test_models_that_share_no_seed_are_read_by_lengths_of_their_own(values, tmp_path):
    values |= {"symphony": {"calibration": {"sequence_length": 128}}, "seed_model": {}}
    del values["statistics"]
    found = said(values, tmp_path, strangers.model_faults)
    assert found == [too_long("symphony.calibration", 128)]
    values["symphony"]["alignment"] = {"neurons": "none"}  # which reads none
    assert said(values, tmp_path, strangers.model_faults) == []


def test_rows_that_share_no_seed_have_lengths_of_their_own(values, tmp_path):
    del values["statistics"]
    short = {"calibration": {"sequence_length": 64}}
    values |= {"symphony": short, "seed_model": {}}

    def of_row(**own):
        row = {"method": "symphony", "training": {**TRAINING, "steps": 5}, **own}
        found = said({**values, "baselines": {"own": row}}, tmp_path, strangers.model_faults)
        return [line.partition(":")[0] for line in found]

    where = "baselines.own.symphony.calibration.sequence_length"
    assert of_row(symphony={"calibration": {"sequence_length": 65}}) == [f"{where} = 65"]
    assert of_row() == [f"{where} = 1024"]  # all as it is by default
    assert of_row(symphony=short) == []
    assert of_row(symphony={"alignment": {"neurons": "none"}}) == []  # which reads none
    ridge = of_row(symphony={**short, "router": "ridge"})
    assert ridge == ["statistics.sequence_length = 1024"]


def test_positions_are_those_that_a_model_says(tmp_path):
    config = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    assert positions(config) is None  # nothing said: no limit
    config["max_position_embeddings"] = 32768
    assert positions(config) == 32768
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert positions({**config, "rope_scaling": yarn}) == 131072  # as Qwen2.5's card says it
    config["max_position_embeddings"] = 131072
    assert positions({**config, "rope_scaling": yarn}) == 131072
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert positions({**config, "rope_parameters": llama3}) == 131072
    config["max_position_embeddings"] = 4096
    assert positions({**config, "rope_scaling": {"type": "linear", "factor": 4.0}}) == 16384
