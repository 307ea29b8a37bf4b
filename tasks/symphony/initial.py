"""Stage ``starts``: strangers joined without training, once for each way of doing so.

The recipe's own way is the item ``symphony``; every row to compare with is another.
"""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.baselines.start import start_of
from tasks.engine.stage import StageRun, each, stage
from tasks.engine.workspace import take
from tasks.symphony.harmonise import harmonise
from tasks.symphony.pairs import config_key
from tasks.symphony.unified import ALONE, lifted
from tasks.symphony.variants import SYMPHONY, anchor_of, pairings, section, variants
from tasks.symphony.variants import starts as starts_of


def _inputs(recipe: Recipe, item: str) -> Iterator[str]:
    config = variants(recipe).get(item)
    if config is None and recipe.baselines[item].method != "full-finetune":
        yield "united"
        return
    yield from each(recipe, "experts/{domain}")
    if config is None:
        return
    pairing = pairings(recipe).get(item)
    if pairing is not None:
        yield f"pairs/{pairing}"
    if config.router == "ridge":
        yield from each(recipe, "corpora/{domain}/calibration")


def _keys(recipe: Recipe, item: str) -> Iterator[str]:
    yield from ("seed", "moe", "symphony.segmentation")
    config = variants(recipe).get(item)
    if config is None:
        yield from ("symphony.anchor", "symphony.models")
        row = ("method", "top_k", "copies", "start", "reinitialised")
        yield from (f"baselines.{item}.{part}" for part in row)
        return
    parts = ("models", "anchor", "merge", "alignment", "calibration", "router")
    yield from config_key(recipe, item, *parts)
    if item != SYMPHONY:
        yield f"baselines.{item}.top_k"
    if config.router == "ridge":
        yield from ("statistics", "router")


@stage("starts/{variant}", _inputs, params=_keys, each=starts_of)
def starts(run: StageRun) -> None:
    """Write the checkpoint that training starts from."""
    recipe, config = run.recipe, variants(run.recipe).get(run.item)
    if run.item == SYMPHONY:
        take(harmonise(run, section(recipe), top_k=recipe.moe.top_k), run.out)
        return
    row = recipe.baselines[run.item]
    if config is not None:
        start = harmonise(run, config, top_k=row.top_k)
    elif row.method == "full-finetune":  # the dense anchor, which must be able to read all tokens
        anchor = anchor_of(recipe, section(recipe))
        start = lifted(run, [anchor], config=ALONE, anchor=anchor)[anchor]
    else:
        united = {name: run.path("united") / name for name in recipe.domains}
        parts = {"experts": united, "seed_model": next(iter(united.values()))}
        start = start_of(run, row, "assembly", domains=len(united), **parts)
    take(start, run.out)
