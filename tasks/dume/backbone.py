"""Stage ``backbone``: everything that is not an MLP, merged (DUME, section 2.2: averaged)."""

from collections.abc import Sequence
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.engine.params import merge_keys
from tasks.engine.stage import StageRun, stage
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.config import MergeConfig
from upcycle_core.backbone.counts import token_counts
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.progress import Progress


def averaged(recipe: Recipe) -> tuple[str, ...]:
    """Domains whose experts' backbones are averaged."""
    if recipe.lineage is not None and "backbone" in recipe.lineage.pinned:
        return recipe.lineage.backbone
    return recipe.backbone.experts or tuple(recipe.domains)


def _counted(recipe: Recipe) -> list[str]:
    """Texts whose tokens are counted, in the order of the experts; none where nothing asks."""
    if not any(merge_keys(recipe)):
        return []
    return [
        f"corpora/{name}/{'calibration' if _has_no_train(recipe, name) else 'train'}"
        for name in averaged(recipe)
    ]


def _has_no_train(recipe: Recipe, name: str) -> bool:
    return name in recipe.domains and recipe.domains[name].train is None


def _params(recipe: Recipe, item: str) -> list[str]:
    return ["moe.max_shard_bytes", *merge_keys(recipe)]


@stage(
    "backbone",
    lambda recipe, item: [*(f"experts/{n}" for n in averaged(recipe)), *_counted(recipe)],
    params=_params,
)
def backbone(run: StageRun) -> None:
    """Write the merged tensors."""
    run.run_one(
        merge_piece,
        "assembly",
        experts=[run.path(f"experts/{name}") for name in averaged(run.recipe)],
        merge=run.recipe.backbone.merge,
        texts=[run.path(text) for text in _counted(run.recipe)],
        max_shard_bytes=run.recipe.moe.max_shard_bytes,
    )


def merge_piece(
    *,
    out: Path,
    progress: Progress,
    experts: Sequence[Path],
    merge: MergeConfig,
    texts: Sequence[Path],
    max_shard_bytes: int,
) -> None:
    """The piece."""
    progress.start("merging the backbone", 1, "models")
    readers = [CheckpointReader(path) for path in experts]
    size = readers[0].config["vocab_size"]
    counts = [token_counts(text, size) for text in texts]
    write_backbone(readers, out, max_shard_bytes=max_shard_bytes, merge=merge, counts=counts)
    progress.advance()
