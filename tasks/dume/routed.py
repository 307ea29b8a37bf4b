"""Stage ``routed``: the repaired experts, repaired once more for what the solved routers send them.

It runs where ``experts.repair_tokens`` asks for it. Then oracle and MoE read these experts;
statistics and routers stay those of the first repair. All experts are one piece: what one of them
is sent in a layer hangs on what the others made of it in the layers before.
"""

from collections.abc import Iterator
from typing import Any

from infra.recipe.schema import Recipe
from tasks.dume.files import ROUTED, ROUTERS, all_solved_on, repairs_routed, solved_on_paths
from tasks.engine.params import regression_keys, routed_repair_keys
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.dume.routed import repair_routed
from upcycle_core.dume.router_reader import load_routers


def _inputs(recipe: Recipe, item: str) -> list[str]:
    patterns = ("experts/{domain}", "corpora/{domain}/calibration")
    found = [name for pattern in patterns for name in each(recipe, pattern)]
    return [*found, *all_solved_on(recipe), "backbone", "router"]


def _params(recipe: Recipe, item: str) -> Iterator[str]:
    yield from (*routed_repair_keys(recipe), "moe.max_shard_bytes", *regression_keys())


@stage(ROUTED, _inputs, params=_params, each=lambda recipe: [""] if repairs_routed(recipe) else ())
def routed(run: StageRun) -> None:
    """Write a checkpoint an expert, and ``repair.json``: lambda and tokens of each layer."""
    domains = run.recipe.domains
    said: dict[str, list[dict[str, Any]]] = run.run_one(
        repair_routed,
        "statistics",
        backbone=run.path("backbone"),
        experts={domain: run.path(f"experts/{domain}") for domain in domains},
        repaired=solved_on_paths(run),
        corpora={domain: run.path(f"corpora/{domain}/calibration") for domain in domains},
        routers=load_routers(run.path("router") / ROUTERS["calibration"]).weights,
        config=run.recipe.statistics,
        max_shard_bytes=run.recipe.moe.max_shard_bytes,
        device=run.device("statistics"),
    )
    for domain, layers in said.items():
        left = 100 * sum(layer["drift"] for layer in layers) / len(layers)
        run.session.log(f"{domain}: of what it is sent, {left:.0f} % of the drift is left")
