"""Stage ``backbone``: the average of everything that is not an MLP (DUME, section 2.2)."""

from collections.abc import Sequence
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.engine.stage import StageRun, stage
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.progress import Progress


def averaged(recipe: Recipe) -> tuple[str, ...]:
    """Domains whose experts' backbones are averaged."""
    if recipe.lineage is not None and "backbone" in recipe.lineage.pinned:
        return recipe.lineage.backbone
    return recipe.backbone.experts or tuple(recipe.domains)


@stage(
    "backbone",
    lambda recipe, domain: [f"experts/{name}" for name in averaged(recipe)],
    params=("moe.max_shard_bytes",),
)
def backbone(run: StageRun) -> None:
    """Write the averaged tensors."""
    run.run_one(
        average_piece,
        "assembly",
        experts=[run.path(f"experts/{name}") for name in averaged(run.recipe)],
        max_shard_bytes=run.recipe.moe.max_shard_bytes,
    )


def average_piece(
    *, out: Path, progress: Progress, experts: Sequence[Path], max_shard_bytes: int
) -> None:
    """The piece."""
    progress.start("averaging the backbone", 1, "models")
    readers = [CheckpointReader(path) for path in experts]
    write_backbone(readers, out, max_shard_bytes=max_shard_bytes)
    progress.advance()
