"""Labels of instructions, of which Branch-Train-MiX needs two, and a plan their number."""

import pytest
from pico import save_pico

from tasks.planning.simoe import simoe_rows
from tasks.planning.subjects import subjects_of
from tasks.recipes import validate
from tasks.simoe.labels import label_faults, planned_labels
from tests.tasks.simoe.test_simoe_faults import VALID, changed


@pytest.mark.parametrize(
    ("row", "enough"),
    [({}, True), ({"top_k": 3}, False), ({"top_k": 3, "seed_expert": True}, True)],
)
def test_as_many_labels_are_enough_as_experts_that_a_token_passes_through(row, enough):
    recipe = validate(changed("baselines/btx", {**VALID["baselines"]["btx"], **row}))
    faults = list(label_faults(recipe, ["law", "tax"]))
    assert not faults if enough else "it needs 3" in str(faults[0])


def planned(folder, **instructions):
    save_pico(folder)
    files = {"mine": {"files": ["mine.jsonl"]}}
    values = changed("seed_model", {"model": str(folder)})
    values |= {"domains": {}, "instructions": {"sources": files, "unseen": ["u"], **instructions}}
    values["baselines"] = {"btx": VALID["baselines"]["btx"]}
    recipe = validate(values)
    subjects = subjects_of(recipe, folder)
    rows = {row.stage: row for row in simoe_rows(recipe, subjects)}
    return recipe, subjects.shape, rows


def test_a_plan_counts_an_expert_a_label(tmp_path):
    """No text is read where the seed is given: the recipe has no domains."""
    domains = {"a": "law", "b": "tax", "c": "code", "u": "art"}
    recipe, shape, rows = planned(tmp_path, domains=domains)
    assert planned_labels(recipe) == 3
    assert rows["baselines"].kept == 4 * shape.mixture(3)


def test_a_plan_counts_two_experts_where_records_name_their_labels(tmp_path):
    recipe, shape, rows = planned(tmp_path)
    assert planned_labels(recipe) == 2
    assert rows["baselines"].kept == 4 * shape.mixture(2)


def test_the_families_labels_are_known():
    assert planned_labels(validate(VALID)) == 5
    few = {"train_categories": ["last_letter", "vowel"]}
    assert planned_labels(validate(changed("instructions", VALID["instructions"] | few))) == 2
