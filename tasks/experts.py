"""Stage ``experts``: one expert a domain, trained from the seed or given."""

from infra.recipe import Recipe
from tasks.seed import TRAINING_SOURCES, train_piece
from tasks.stage import StageRun, stage
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.checkpoints.fetch import resolve_model


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    given = [f"sources/{domain}.json"]
    return [*given, f"corpora/{domain}/train", "seed"] if recipe.trains_experts else given


@stage(
    "experts/{domain}",
    inputs=_inputs,
    params=("seed", "experts", "domains.{domain}.expert", "compute.experts"),
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
    run.run_one(
        train_piece,
        "experts",
        start=run.path("seed"),
        shape=None,
        corpora=[run.path(f"corpora/{run.domain}/train")],
        config=recipe.experts.training,
        seed=recipe.seed,
        device=run.device("experts"),
    )
