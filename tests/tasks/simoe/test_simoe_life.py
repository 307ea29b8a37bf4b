"""A set of instructions leaves, and the recipe may still name it and what only it had."""

import json

import pytest

from tasks.recipes import validate
from tasks.simoe.life import without
from tests.tasks.simoe.test_simoe_faults import VALID, changed
from upcycle_core.corpora.tuning.prepare import instruction_faults


def written(folder, name, *categories):
    lines = [
        {"prompt": f"{category} {i}", "response": "a", "category": category}
        for category in categories
        for i in range(9)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"files": [str(folder / f"{name}.jsonl")]}


@pytest.fixture
def recipe(tmp_path):
    sources = {
        "stays": written(tmp_path, "stays", "law", "tax", "greet"),
        "leaves": written(tmp_path, "leaves", "art", "greet", "sing"),
    }
    labels = {"law": "office", "tax": "office", "art": "stage", "greet": "office"}
    asked = {"unseen": ["greet", "sing"], "train_categories": ["law", "art"], "domains": labels}
    return validate(changed("instructions", {"sources": sources, **asked}))


def test_categories_of_the_set_that_left_leave_with_it(recipe):
    rest = without(recipe, "leaves").instructions
    assert list(rest.sources) == ["stays"]
    assert (rest.unseen, rest.train_categories) == (("greet",), ("law",))
    assert rest.domains == {"law": "office", "tax": "office", "greet": "office"}
    assert instruction_faults(rest, folder=None) == []


@pytest.mark.parametrize("files", [["nowhere.jsonl"], None])
def test_categories_stay_where_it_is_not_known_which_there_are(recipe, files):
    other = {"files": files} if files else {"dataset": "org/name"}
    sources = VALID["instructions"]["sources"] | {"other": other}
    given = recipe.instructions
    asked = {"unseen": given.unseen, "domains": given.domains, "sources": sources}
    rest = without(validate(changed("instructions", asked)), "families").instructions
    assert (rest.unseen, rest.domains) == (given.unseen, given.domains)


def test_a_set_that_the_recipe_names_no_more_changes_nothing(recipe):
    assert without(recipe, "gone") == recipe


def test_families_are_known_without_being_made():
    sources = VALID["instructions"]["sources"] | {"other": {"files": ["nowhere.jsonl"]}}
    asked = {"unseen": ["give_number", "mine"], "sources": sources}
    rest = without(validate(changed("instructions", asked)), "other").instructions
    assert rest.unseen == ("give_number",)
