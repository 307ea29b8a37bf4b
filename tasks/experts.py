"""Stage ``experts``: one expert a domain, trained from the seed, continued, or given."""

from collections.abc import Iterator

from infra.recipe import Recipe
from tasks.seed import TRAINING_SOURCES, train_piece
from tasks.stage import StageRun, stage
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.checkpoints.fetch import resolve_model


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    given = [f"sources/{domain}.json"]
    start = f"parents/{domain}" if domain in recipe.parents else "seed"
    return [*given, f"corpora/{domain}/train", start] if recipe.trains_experts else given


def _params(recipe: Recipe, domain: str) -> Iterator[str]:
    yield from ("seed", "experts.training", "domains.{domain}.expert", "compute.experts")
    if domain in recipe.parents:
        yield "experts.continued"


@stage(
    "experts/{domain}",
    inputs=_inputs,
    params=_params,
    sources=TRAINING_SOURCES,
    needed=lambda recipe: recipe.method == "dume",
)
def experts(run: StageRun) -> None:
    """Write the expert's checkpoint."""
    recipe = run.recipe
    given = recipe.domains[run.domain].expert
    if given is not None:
        copy_checkpoint(resolve_model(given, run.models), run.out)
        return
    is_continued = run.domain in recipe.parents
    run.run_one(
        train_piece,
        "experts",
        start=run.path(f"parents/{run.domain}" if is_continued else "seed"),
        shape=None,
        corpora=[run.path(f"corpora/{run.domain}/train")],
        config=recipe.experts.continuing if is_continued else recipe.experts.training,
        seed=recipe.seed,
        device=run.device("experts"),
    )
