"""Stage ``repaired``: each expert in the merged backbone, its MLPs repaired in closed form.

It runs where ``experts.repair`` asks for it. Then statistics, routers, oracle and MoE read the
repaired experts, else the experts themselves.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.params import regression_keys, repair_keys
from tasks.engine.stage import StageRun, stage
from upcycle_core.dume.checks import more_tokens
from upcycle_core.dume.repair import repair_expert
from upcycle_core.progress import Progress


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    return [f"experts/{domain}", "backbone", f"corpora/{domain}/calibration"]


def _params(recipe: Recipe, domain: str) -> Iterator[str]:
    yield from (*repair_keys(recipe), "moe.max_shard_bytes", *regression_keys())


@stage(
    "repaired/{domain}",
    _inputs,
    params=_params,
    each=lambda recipe: recipe.domains if recipe.experts.repair != "none" else (),
)
def repaired(run: StageRun) -> None:
    """Write the checkpoint, and ``repair.json``: each layer's lambda, tokens and what is left."""
    layers = run.run_one(
        repair_piece,
        "statistics",
        backbone=run.path("backbone"),
        expert=run.path(f"experts/{run.domain}"),
        corpus=run.path(f"corpora/{run.domain}/calibration"),
        repair=run.recipe.experts.repair,
        config=run.recipe.statistics,
        max_shard_bytes=run.recipe.moe.max_shard_bytes,
        device=run.device("statistics"),
    )
    left = [layer["drift"] for layer in layers]
    mean = 100 * sum(left) / len(left)
    words = f"the repair leaves {mean:.0f} % of the drift, mean of layers"
    each = f"{layers[0]['tokens_a_neuron']:.0f} calibration tokens a neuron"
    run.session.log(f"{run.domain}: {words}, by {each}")
    if more := more_tokens(layers):
        run.session.log(f"{run.domain}: {more}")


def repair_piece(*, out: Path, progress: Progress, **arguments: Any) -> list[dict[str, Any]]:
    """The piece."""
    return repair_expert(out=out, progress=progress, **arguments)
