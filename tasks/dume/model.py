"""Stage ``model``: experts, averaged backbone and routers as one stock MoE checkpoint."""

from infra.recipe.schema import recipe_yaml
from tasks.data.given import forms
from tasks.dume.files import ROUTERS, all_experts, joined_paths
from tasks.engine.params import dume_keys
from tasks.engine.stage import StageRun, stage
from upcycle_core.checkpoints.card import write_model_card
from upcycle_core.dume.router_reader import load_routers
from upcycle_core.moe.assemble import assemble


@stage(
    "model",
    lambda recipe, domain: [*all_experts(recipe), "backbone", "router"],
    params=lambda recipe, item: dume_keys(recipe),
    in_parts=True,
)
def model(run: StageRun) -> None:
    """Write the checkpoint."""
    recipe = run.recipe
    run.run_one(
        assemble,
        "assembly",
        experts=joined_paths(run),
        backbone=run.path("backbone"),
        routers=load_routers(run.path("router") / ROUTERS["calibration"]).weights,
        top_k=recipe.moe.top_k,
        normalise=recipe.moe.normalise_top_k,
        max_shard_bytes=recipe.moe.max_shard_bytes,
    )
    write_model_card(
        run.out,
        title=recipe.name,
        recipe_text=recipe_yaml(recipe, dume_keys(recipe)),
        method="DUME",
        experts=list(recipe.domains),
        given=forms(run),
    )
