"""The recipes of the papers, held against the published configurations of the models they name."""

from pathlib import Path

import pytest

from tasks.data import sources
from tasks.recipes import load_recipe
from tasks.symphony import sources as strangers
from tests.configs.published import checkpoint
from upcycle_core.errors import InputError

PAPER = Path(__file__).parents[3] / "recipes" / "paper"


def recipe_of(path: Path):
    """A recipe that is whole; None for rows and tasks that stand beside one."""
    try:
        return load_recipe(path, ["folder=."])
    except InputError:
        return None


RECIPES = {
    path.stem: recipe for path in sorted(PAPER.glob("*.yaml")) if (recipe := recipe_of(path))
}


def named(recipe) -> set[str]:
    """Every model that a recipe names."""
    found = {recipe.seed_model.model}
    for domain in recipe.domains.values():
        found |= {domain.expert, domain.origin.model if domain.origin is not None else None}
    return {name for name in found if name is not None}


@pytest.mark.parametrize("name", RECIPES)
def test_every_model_of_a_papers_recipe_passes_its_check(tmp_path, monkeypatch, name):
    models = {
        model: checkpoint(model, tmp_path / f"model{index}", seed=index)
        for index, model in enumerate(sorted(named(RECIPES[name])))
    }
    monkeypatch.setattr(sources, "given_model", lambda recipe, model, cache: models[model])
    recipe = RECIPES[name]
    look = strangers.model_faults if recipe.method == "symphony" else sources.model_faults
    assert look(recipe, tmp_path / "cache") == []


def test_recipes_with_models_are_among_them():
    assert {"symphony", "simoe-sni", "simoe-tulu"} <= {n for n, r in RECIPES.items() if named(r)}
    assert len(named(RECIPES["symphony"])) == 3
