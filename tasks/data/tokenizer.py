"""Stage ``tokenizer``: trained on all domains, or the one that the given models share."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.data.given import given_model
from tasks.engine.artifacts import FORMS, SEED
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.backbone.form import Form
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.corpora.tokenizer import train_tokenizer


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    if recipe.trains_seed:
        return list(each(recipe, "documents/{domain}"))
    named = SEED if recipe.seed_model.model is not None else next(iter(recipe.domains))
    return [f"sources/{named}.json", f"sources/{FORMS}/{named}"]


def _params(recipe: Recipe, item: str) -> Iterator[str]:
    yield "seed_model.model"
    if recipe.trains_seed:
        yield "tokenizer"


@stage("tokenizer", _inputs, params=_params)
def tokenizer(run: StageRun) -> None:
    """Write the tokenizer's files."""
    recipe = run.recipe
    if not recipe.trains_seed:
        given = recipe.seed_model.model
        name = SEED if given is not None else next(iter(recipe.domains))
        given = given or recipe.domains[name].expert
        assert given is not None
        tokenizer = Form.load(run.path(f"sources/{FORMS}/{name}")).tokenizer
        copy_tokenizer(tokenizer or given_model(recipe, given, run.models), run.out)
        return
    run.run_one(
        train_tokenizer,
        "corpora",
        documents={name: run.path(f"documents/{name}") for name in recipe.domains},
        config=recipe.tokenizer,
    )
