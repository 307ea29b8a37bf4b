"""Stage ``baselines``: one published way of upcycling, built and trained, a row of a comparison."""

from collections.abc import Iterator
from typing import Any

from infra.recipe.schema import Recipe
from tasks.baselines.rows import train_row
from tasks.baselines.start import start_of
from tasks.dume.files import ROUTERS, all_joined, joined_paths
from tasks.engine.params import weight_keys
from tasks.engine.stage import StageRun, each, stage
from tasks.training import trained_rows
from upcycle_core.baselines.config import Baseline
from upcycle_core.dume.router_reader import load_routers


def _inputs(recipe: Recipe, name: str) -> list[str]:
    baseline = recipe.baselines[name]
    found = list(each(recipe, "corpora/{domain}/train"))
    if baseline.training.evaluation_steps is not None:
        found += each(recipe, "corpora/{domain}/calibration")
    if baseline.method == "dume":
        found += all_joined(recipe)
    elif baseline.uses_experts:
        found += each(recipe, "experts/{domain}")
    if baseline.uses_seed:
        found.append("seed")
    if baseline.method == "dume":
        found += ["backbone", "router"]
    return found


def _params(recipe: Recipe, name: str) -> Iterator[str]:
    yield from ("seed", "baselines.{baseline}", "moe.max_shard_bytes")
    if recipe.baselines[name].method == "dume":
        yield from weight_keys(recipe)


@stage("baselines/{baseline}", _inputs, params=_params, each=trained_rows)
def baselines(run: StageRun) -> None:
    """Write the trained checkpoint, and beside it what its training came to."""
    recipe, baseline = run.recipe, run.recipe.baselines[run.item]
    domains = len(recipe.domains)
    start = start_of(run, baseline, "baselines", domains=domains, **_parts(run, baseline))
    train_row(run, start, domains=domains)


def _parts(run: StageRun, baseline: Baseline) -> dict[str, Any]:
    """The models that its start is made of, and how."""
    parts: dict[str, Any] = {}
    if baseline.method == "dume":
        parts["experts"] = joined_paths(run)
    elif baseline.uses_experts:
        parts["experts"] = {d: run.path(f"experts/{d}") for d in run.recipe.domains}
    if baseline.uses_seed:
        parts["seed_model"] = run.path("seed")
    if baseline.method == "dume":
        parts["backbone"] = run.path("backbone")
        parts["routers"] = load_routers(run.path("router") / ROUTERS["calibration"]).weights
        parts["normalise"] = run.recipe.moe.normalise_top_k
    return parts
