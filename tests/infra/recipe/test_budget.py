"""The token budget sets each row's steps: what its experts have seen counts."""

import pytest
from texts import pico_recipe

from tasks.recipes import validate
from upcycle_core.errors import InputError

DOMAINS = ("letters", "numbers")
STEP = 4 * 32
EXPERTS = 2 * 15 * STEP
TRAINING = {"batch_size": 4, "sequence_length": 32, "warmup_steps": 2, "steps": 77}


def recipe(tmp_path, tokens, **rows):
    values = pico_recipe(tmp_path, domains=DOMAINS)
    return validate({**values, "baselines": rows, "comparison": {"tokens": tokens}})


def row(method, **more):
    return {"method": method, "training": TRAINING, **more}


def test_rows_that_begin_with_experts_get_what_is_left(tmp_path):
    found = recipe(
        tmp_path,
        EXPERTS + 10 * STEP,
        btx=row("btx"),
        own=row("drop-upcycling", start="experts"),
        copies=row("drop-upcycling"),
        full=row("full-finetune"),
    ).baselines
    steps = {name: baseline.training.steps for name, baseline in found.items()}
    assert steps == {"btx": 10, "own": 10, "copies": 40, "full": 40}


def test_a_part_of_a_step_is_left_over(tmp_path):
    found = recipe(tmp_path, 10 * STEP + STEP - 1, full=row("full-finetune"))
    assert found.baselines["full"].training.steps == 10


def test_without_a_budget_rows_keep_their_steps(tmp_path):
    assert recipe(tmp_path, None, btx=row("btx")).baselines["btx"].training.steps == 77


def test_given_experts_cost_nothing_here(tmp_path):
    values = pico_recipe(tmp_path, domains=DOMAINS)
    values["domains"]["letters"]["expert"] = "somewhere"
    values["seed_model"] = {"model": "elsewhere"}
    found = validate(
        {**values, "baselines": {"btx": row("btx")}, "comparison": {"tokens": EXPERTS}}
    )
    assert found.baselines["btx"].training.steps == 15


def test_too_small_a_budget_says_what_is_needed(tmp_path):
    with pytest.raises(InputError, match=f"give {EXPERTS + 3 * STEP} or more"):
        recipe(tmp_path, EXPERTS + 2 * STEP, btx=row("btx"))


def test_a_budget_of_zero_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"comparison\.tokens"):
        recipe(tmp_path, 0, btx=row("btx"))


@pytest.mark.parametrize("tokens", [None, EXPERTS + 10 * STEP])
def test_settings_of_a_row_are_judged_with_and_without_a_budget(tmp_path, tokens):
    training = {**TRAINING, "keep": "best"}
    with pytest.raises(InputError, match=r"baselines\.btx\.training\.keep"):
        recipe(tmp_path, tokens, btx={"method": "btx", "training": training})


def test_seed_and_experts_have_no_validation(tmp_path):
    values = pico_recipe(tmp_path, domains=DOMAINS)
    for section in (values["seed_model"], values["experts"]):
        section["training"] = {**section["training"], "evaluation_steps": 5}
    with pytest.raises(InputError) as caught:
        validate(values)
    assert [fault.field for fault in caught.value.faults] == [
        "seed_model.training.evaluation_steps",
        "experts.training.evaluation_steps",
    ]
