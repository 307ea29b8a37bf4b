"""Stage ``model``: experts, averaged backbone and routers as one stock MoE checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from infra.recipe.schema import recipe_yaml
from tasks.dume.files import ROUTERS
from tasks.engine.params import dume_keys
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.checkpoints.card import write_model_card
from upcycle_core.dume.router_reader import load_routers
from upcycle_core.moe.assemble import assemble
from upcycle_core.progress import Progress


@stage(
    "model",
    inputs=lambda recipe, domain: [*each(recipe, "experts/{domain}"), "backbone", "router"],
    params=lambda recipe, item: dume_keys(recipe),
)
def model(run: StageRun) -> None:
    """Write the checkpoint."""
    recipe = run.recipe
    run.run_one(
        assemble_piece,
        "assembly",
        experts={name: run.path(f"experts/{name}") for name in recipe.domains},
        backbone=run.path("backbone"),
        routers=run.path("router") / ROUTERS["calibration"],
        top_k=recipe.moe.top_k,
        max_shard_bytes=recipe.moe.max_shard_bytes,
        title=recipe.name,
        recipe=recipe_yaml(recipe, dume_keys(recipe)),
    )


def assemble_piece(
    *,
    out: Path,
    progress: Progress,
    experts: Mapping[str, Path],
    backbone: Path,
    routers: Path,
    top_k: int,
    max_shard_bytes: int,
    title: str,
    recipe: str,
) -> None:
    """The piece."""
    assemble(
        experts,
        backbone,
        load_routers(routers).weights,
        out,
        top_k=top_k,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    write_model_card(out, title=title, recipe_text=recipe, method="DUME", experts=list(experts))
