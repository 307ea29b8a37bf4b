"""Stage ``tokenizer``: trained on all domains, or the one that the given models share."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.engine.artifacts import SEED
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.checkpoints.fetch import resolve_model
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.corpora.tokenizer import train_tokenizer


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    if recipe.trains_seed:
        return list(each(recipe, "documents/{domain}"))
    if recipe.seed_model.model is not None:
        return [f"sources/{SEED}.json"]
    return [f"sources/{next(iter(recipe.domains))}.json"]


def _params(recipe: Recipe, item: str) -> Iterator[str]:
    yield "seed_model.model"
    if recipe.trains_seed:
        yield "tokenizer"


@stage("tokenizer", _inputs, params=_params)
def tokenizer(run: StageRun) -> None:
    """Write the tokenizer's files."""
    recipe = run.recipe
    if not recipe.trains_seed:
        reference = recipe.seed_model.model or next(iter(recipe.domains.values())).expert
        assert reference is not None
        copy_tokenizer(resolve_model(reference, run.models), run.out)
        return
    run.run_one(
        train_tokenizer,
        "corpora",
        documents={name: run.path(f"documents/{name}") for name in recipe.domains},
        config=recipe.tokenizer,
    )
