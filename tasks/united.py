"""Stage ``united``: the strangers as they are, over one vocabulary: what naive joining reads.

Embedding and head of each become the merged ones, so that all have the same rows; the rest is each
model's own.
"""

from collections.abc import Mapping
from pathlib import Path

from infra.compute import Piece
from tasks.segmentation import union_of
from tasks.stage import StageRun, each, stage
from tasks.vocabulary import UNION_SOURCES, union_arguments
from upcycle_core.progress import Progress
from upcycle_core.symphony.config import MergeConfig
from upcycle_core.symphony.merge import write_merged_backbone
from upcycle_core.symphony.unite import write_united

MERGE_SOURCES = (
    *UNION_SOURCES,
    "tasks/segmentation.py",
    "upcycle_core/architectures/axes.py",
    "upcycle_core/backbone/average.py",
    "upcycle_core/backbone/slerp.py",
    "upcycle_core/symphony/merge.py",
)
MEAN = MergeConfig(embeddings="mean", attention="mean", norms="mean")


@stage(
    "united",
    inputs=lambda recipe, item: each(recipe, "experts/{domain}"),
    params=("symphony.segmentation", "moe.max_shard_bytes"),
    sources=(*MERGE_SOURCES, "tasks/united.py", "upcycle_core/symphony/unite.py"),
    needed=lambda recipe: recipe.method == "symphony",
)
def united(run: StageRun) -> None:
    """Write ``DOMAIN/``, a checkpoint each."""
    domains = list(run.recipe.domains)
    common = {"max_shard_bytes": run.recipe.moe.max_shard_bytes, **union_arguments(run)}
    merged = Piece(name="merged", function=merged_piece, arguments=common)
    backbone = run.run([merged], "assembly")["merged"].path
    pieces = [
        Piece(name=d, function=united_piece, arguments={"name": d, "backbone": backbone, **common})
        for d in domains
    ]
    for name, done in run.run(pieces, "assembly").items():
        done.path.rename(run.out / name)


def merged_piece(
    *,
    out: Path,
    progress: Progress,
    models: Mapping[str, Path],
    segmentation: str | None,
    max_shard_bytes: int,
) -> None:
    """The piece: the mean of all that is no FFN, token by token for embedding and head."""
    write_merged_backbone(
        models,
        union_of(models, segmentation),
        out,
        config=MEAN,
        anchor=next(iter(models)),
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def united_piece(
    *,
    out: Path,
    progress: Progress,
    name: str,
    backbone: Path,
    models: Mapping[str, Path],
    segmentation: str | None,
    max_shard_bytes: int,
) -> None:
    """The piece: one model."""
    write_united(models[name], backbone, out, max_shard_bytes=max_shard_bytes, progress=progress)
