"""What a recipe sets in vain is said; the recipes that we publish set nothing so."""

from pathlib import Path

import pytest
from texts import pico_recipe, write_texts

from flows.running.planned import in_vain
from tasks.engine.unread import unread
from tasks.methods import stages_of
from tasks.recipes import load_recipe, validate

RECIPES = Path(__file__).parents[3] / "recipes"
BESIDE = {
    "simoe.yaml": ["simoe-rivals.yaml"],
    "demo.yaml": ["baselines.yaml", "tasks.yaml"],
    "five-domains.yaml": [],
}

OWN = [
    *("demo-real.yaml", "nightly.yaml", "nightly-symphony.yaml", "nightly-simoe.yaml"),
    *("five-domains-long.yaml", "symphony-five-domains.yaml", "paper/dume.yaml", "smollm2.yaml"),
    *BESIDE,
]


def found(recipe):
    return unread(recipe, stages_of(recipe))


@pytest.fixture
def values(tmp_path):
    domains = ("letters", "numbers")
    return pico_recipe(write_texts(tmp_path / "texts", domains=domains), domains=domains)


@pytest.mark.parametrize("name", OWN)
def test_published_recipes_set_nothing_in_vain(name):
    beside = [RECIPES / other for other in BESIDE.get(name, ())]
    assert found(load_recipe(RECIPES / name, ["folder=/texts"], added=beside)) == []


def test_what_is_set_in_vain_is_said(values):
    assert found(validate(values)) == []
    values["router"] = {"lambda_grid": [0.1, 1.0]}
    values["task_evaluation"] = {"batch_size": 2}
    values["experts"]["continued"] = values["experts"]["training"]
    recipe = validate(values)
    assert found(recipe) == ["router.lambda_grid", "task_evaluation.batch_size"]
    (line,) = in_vain(recipe)
    assert "reads router.lambda_grid, task_evaluation.batch_size, which it sets" in line
    values["router"]["ridge_lambda"] = "cross-validate"
    values["tasks"] = {"own": {"heldout": "text", "domain": "letters"}}
    assert found(validate(values)) == []


def test_nothing_that_is_trained_is_read_where_experts_are_given(values):
    for name, domain in values["domains"].items():
        text = domain["train"]
        domain |= {"expert": f"/models/{name}", "calibration": text, "heldout": text}
        del domain["train"]
    given = ["seed_model.shape", "seed_model.training", "experts.training"]
    assert found(validate(values)) == ["tokenizer.vocabulary_size", *given]
    values["compute"] = {"experts": {"workers": 2}, "statistics": {"cpus": 2}}
    values["compute"] |= {kind: {"cpus": 2} for kind in ("baselines", "task_evaluation")}
    idle = [f"compute.{kind}" for kind in ("experts", "task_evaluation", "baselines")]
    assert found(validate(values)) == ["tokenizer.vocabulary_size", *given, *idle]
