"""Stage ``tokenizer``: trained on all domains, or the one that the given models share."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.data.given import given_model
from tasks.engine.artifacts import FORMS, SEED
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.backbone.form import Form
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.corpora.tokenizer import train_tokenizer


def speaker(recipe: Recipe) -> str:
    """Whose tokenizer text is read with, domain or seed: of given models, whose the MoE has.

    Experts that are trained here have the seed's, so that it is theirs where there are any.
    """
    ready = [domain.expert is not None for domain in recipe.domains.values()]
    if not ready or not all(ready):
        return SEED
    return next(iter(recipe.backbone.experts or recipe.domains))


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    if recipe.trains_seed:
        return list(each(recipe, "documents/{domain}"))
    named = speaker(recipe)
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
        name = speaker(recipe)
        given = recipe.seed_model.model if name == SEED else recipe.domains[name].expert
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
