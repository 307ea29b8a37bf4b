"""What of a recipe with instructions trains its models again, and what does not."""

import pytest

from tasks.recipes import validate
from tasks.simoe.answers import answers
from tasks.simoe.model import baselines, model
from tests.tasks.simoe.test_simoe_faults import VALID, changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tuning/batch_size", 4),
        ("tuning/max_new_tokens", 16),
        ("tuning/least_exact_match", 0.1),
        ("instructions/sources", {"mine": {"generate": "families"}}),
        ("instructions/test_per_task", 20),
        ("seed_model/model", "elsewhere/model"),
    ],
)
def test_how_models_answer_and_where_inputs_lie_train_nothing_again(path, value):
    """What instructions and seed came to is in their digests."""
    assert model.values(validate(changed(path, value)), "") == model.values(validate(VALID), "")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tuning/training/steps", 30),
        ("tuning/training/checkpoint_steps", 25),
        ("instructions/too_long", "leave-out"),
        ("simoe/beta", 0.1),
        ("seed", 7),
        ("moe/max_shard_bytes", 10**6),
    ],
)
def test_what_decides_the_training_trains_again(path, value):
    assert model.values(validate(changed(path, value)), "") != model.values(validate(VALID), "")


@pytest.mark.parametrize("row", ["dense", "copies", "btx", "free"])
def test_rivals_are_tuned_on_what_the_model_is(row):
    left_out = validate(changed("instructions/too_long", "leave-out"))
    assert baselines.values(left_out, row) != baselines.values(validate(VALID), row)


@pytest.mark.parametrize(("row", "decides"), [("free", True), ("dense", False)])
def test_which_steps_are_kept_decides_a_simoe_alone(row, decides):
    kept = validate(changed(f"baselines/{row}/training/checkpoint_steps", 25))
    assert (baselines.values(kept, row) != baselines.values(validate(VALID), row)) == decides


@pytest.mark.parametrize(
    ("stage", "item"), [(model, ""), (baselines, "dense"), (baselines, "free")]
)
def test_of_the_instructions_those_that_train_alone_decide(stage, item):
    recipe = validate(changed("simoe/routing", "task"))
    assert set(stage.inputs(recipe, item)) == {"instructions/train", "seed"}


@pytest.mark.parametrize(("row", "made"), [("seed", "seed"), ("simoe", "model")])
def test_instructions_that_train_alone_have_no_model_asked_again(row, made):
    held = {"instructions/seen.jsonl", "instructions/unseen.jsonl"}
    assert set(answers.inputs(validate(VALID), row)) == {*held, made}
