"""Stage ``starts``: strangers joined without training, once for each way of doing so.

The recipe's own way is the item ``symphony``; every row to compare with is another.
"""

from collections.abc import Iterator

from infra.cluster.compute import Piece
from infra.recipe.schema import SYMPHONY, Recipe
from tasks.engine.stage import StageRun, each, stage
from tasks.engine.workspace import take
from tasks.symphony.harmonise import harmonise
from tasks.symphony.pairs import config_key
from tasks.symphony.unified import ALONE, lifted
from upcycle_core.baselines.start import write_start


def start_top_k(recipe: Recipe, item: str) -> int:
    """Experts that a token passes through."""
    return recipe.moe.top_k if item == SYMPHONY else recipe.baselines[item].top_k


def _inputs(recipe: Recipe, item: str) -> Iterator[str]:
    config = recipe.variants.get(item)
    if config is None and recipe.baselines[item].method != "full-finetune":
        yield "united"
        return
    yield from each(recipe, "experts/{domain}")
    if config is None:
        return
    if item in recipe.pairings:
        yield f"pairs/{recipe.pairings[item]}"
    if config.router == "ridge":
        yield from each(recipe, "corpora/{domain}/calibration")


def _keys(recipe: Recipe, item: str) -> Iterator[str]:
    yield from ("seed", "moe", "symphony.segmentation")
    yield from ("symphony.anchor", "symphony.models") if item not in recipe.variants else ()
    config = recipe.variants.get(item)
    if config is None:
        row = ("method", "top_k", "copies", "start", "reinitialised")
        yield from (f"baselines.{item}.{part}" for part in row)
        return
    parts = ("models", "anchor", "merge", "alignment", "calibration", "router")
    yield from config_key(recipe, item, *parts)
    if item != SYMPHONY:
        yield f"baselines.{item}.top_k"
    if config.router == "ridge":
        yield from ("statistics", "router")


@stage(
    "starts/{variant}",
    inputs=_inputs,
    params=_keys,
    each=lambda recipe: recipe.starts,
)
def starts(run: StageRun) -> None:
    """Write the checkpoint that training starts from."""
    recipe = run.recipe
    config = recipe.variants.get(run.item)
    if config is not None:
        take(harmonise(run, config, top_k=start_top_k(recipe, run.item)), run.out)
        return
    domains, row = list(recipe.domains), recipe.baselines[run.item]
    if row.method == "full-finetune":  # the dense anchor, which must be able to read all tokens
        anchor = recipe.anchor_of(recipe.variants[SYMPHONY])
        take(lifted(run, [anchor], config=ALONE, anchor=anchor)[anchor], run.out)
        return
    piece = Piece(
        name="start",
        function=write_start,
        arguments={
            "baseline": row,
            "experts": {name: run.path("united") / name for name in domains},
            "seed_model": run.path("united") / domains[0],
            "copies": row.experts(len(domains)),
            "seed": recipe.seed,
            "max_shard_bytes": recipe.moe.max_shard_bytes,
        },
    )
    take(run.run([piece], "assembly")["start"].path, run.out)
