"""Stage ``tokenizer``: trained on all domains, or the one that the given models share."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.data.given import given_model, hold_against_sources
from tasks.engine.artifacts import FORMS, SEED
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.backbone.form import Form
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.corpora.tokenizer import train_tokenizer


def speaker(recipe: Recipe) -> str | None:
    """Whose tokenizer text is read with, domain or seed: of given models, whose the MoE has.

    That is the first whose backbone is averaged; one that is trained here has the seed's.

    Returns:
        None where a model is built upon, and that domain has left the recipe.
    """
    lineage = recipe.lineage
    pinned = lineage.backbone if lineage is not None and "backbone" in lineage.pinned else ()
    first = next(iter(pinned or recipe.backbone.experts or recipe.domains), None)
    if first is None:
        return SEED
    if first not in recipe.domains:
        return None
    return first if recipe.domains[first].expert is not None else SEED


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    if recipe.trains_seed:
        return list(each(recipe, "documents/{domain}/train.parquet"))
    named = speaker(recipe)
    if named is None:  # pinned: it is not made again
        return []
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
        name = speaker(recipe) or SEED
        given = recipe.seed_model.model if name == SEED else recipe.domains[name].expert
        assert given is not None
        tokenizer = Form.load(run.path(f"sources/{FORMS}/{name}")).tokenizer
        if tokenizer is None:
            tokenizer = given_model(recipe, given, run.models)
            hold_against_sources(run, tokenizer, name)
        copy_tokenizer(tokenizer, run.out)
        return
    run.run_one(
        train_tokenizer,
        "corpora",
        documents={name: run.path(f"documents/{name}/train.parquet") for name in recipe.domains},
        config=recipe.tokenizer,
    )
