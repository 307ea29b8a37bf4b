"""LoRA adapters of layers that a model does not have are refused before anything is trained."""

import pytest
from pico import CONFIGS, pico_config, save_pico
from texts import TRAINING, pico_recipe, write_texts
from torch import nn
from transformers import AutoModelForCausalLM

from tasks.data import sources
from tasks.data.adapters import linears_of
from tasks.recipes import validate
from tasks.symphony import sources as strangers
from upcycle_core.errors import InputError
from upcycle_core.training.config import LINEARS

DOMAINS = ("letters", "numbers")
ADAPTER = {"method": "lora", "lora": {"modules": ["qproj", "up_proj", "lm_head"]}}
REMEDY = (
    "= ['qproj']: no linear layer is called so; did you mean q_proj? choose among down_proj, "
    "gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
)


@pytest.fixture
def values(tmp_path):
    made = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    made["experts"]["training"] |= ADAPTER
    return made


@pytest.mark.parametrize("family", CONFIGS)
def test_linear_layers_are_those_of_the_stock_class(family):
    config = pico_config(family)
    layers = AutoModelForCausalLM.from_config(config).named_modules()
    names = {name.rpartition(".")[2] for name, m in layers if isinstance(m, nn.Linear)}
    assert linears_of(config.to_dict()) == names == set(LINEARS)


def test_a_name_that_no_layer_has_is_said_of_a_seed_that_is_shaped_here(values):
    training = {**TRAINING, "steps": 5}
    values["experts"]["continued"] = {**training, **ADAPTER}
    values["baselines"] = {
        "dense": {"method": "full-finetune", "tuned": "lora", "lora": ADAPTER["lora"]}
    }
    values["baselines"]["dense"]["training"] = training
    with pytest.raises(InputError) as error:
        validate(values)
    assert [str(fault) for fault in error.value.faults] == [
        f"{where}.lora.modules {REMEDY}"
        for where in ("experts.training", "experts.continued", "baselines.dense")
    ]
    for config in (*values["experts"].values(), values["baselines"]["dense"]):
        config["lora"] = {"modules": ["q_proj"]}
    validate(values)


def test_a_name_that_no_layer_has_is_said_of_a_given_seed(values, tmp_path):
    del values["tokenizer"]
    values["seed_model"] = {"model": str(save_pico(tmp_path / "seed", "qwen3"))}
    faults = sources.model_faults(validate(values), tmp_path / "models")
    assert [str(fault) for fault in faults] == [f"experts.training.lora.modules {REMEDY}"]
    values["experts"]["training"]["lora"] = {"modules": ["q_proj", "self_attn.v_proj"]}
    assert sources.model_faults(validate(values), tmp_path / "models") == []


def test_a_name_that_no_layer_has_is_said_of_what_training_goes_on_from(values, tmp_path):
    del values["tokenizer"], values["seed_model"], values["statistics"]
    values["evaluation"] = {"sequence_length": 32}
    values["symphony"] = {"calibration": {"sequence_length": 32}}
    for seed, domain in enumerate(DOMAINS):
        origin = save_pico(tmp_path / domain, seed=seed)
        values["domains"][domain]["origin"] = {"model": str(origin)}
    faults = strangers.model_faults(validate(values), tmp_path / "models")
    assert [str(fault) for fault in faults] == [f"experts.training.lora.modules {REMEDY}"]
