"""Stage ``united``: the strangers as they are, over one vocabulary: what naive joining reads.

Embedding and head of each become the merged ones, so that all have the same rows; the rest is each
model's own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.cluster.compute import Piece
from tasks.data.segmentation import union_of
from tasks.engine.stage import StageRun, each, stage
from tasks.symphony.vocabulary import union_arguments
from upcycle_core.progress import Progress
from upcycle_core.symphony.config import MergeConfig
from upcycle_core.symphony.merge import write_merged_backbone
from upcycle_core.symphony.unite import write_united

MEAN = MergeConfig(embeddings="mean", attention="mean", norms="mean")
ALONE = MergeConfig(embeddings="anchor", attention="anchor", norms="anchor")


@stage(
    "united",
    inputs=lambda recipe, item: each(recipe, "experts/{domain}"),
    params=("symphony.segmentation", "moe.max_shard_bytes"),
)
def united(run: StageRun) -> None:
    """Write ``DOMAIN/``, a checkpoint each."""
    domains = list(run.recipe.domains)
    for name, path in lifted(run, domains, config=MEAN, anchor=domains[0]).items():
        path.rename(run.out / name)


def lifted(
    run: StageRun, names: Sequence[str], *, config: MergeConfig, anchor: str
) -> dict[str, Path]:
    """Models over the union's vocabulary, with the rows that ``config`` gives it."""
    common = {"max_shard_bytes": run.recipe.moe.max_shard_bytes, **union_arguments(run)}
    arguments = {"config": config, "anchor": anchor, **common}
    merged = Piece(name="merged", function=merged_piece, arguments=arguments)
    backbone = run.run([merged], "assembly")["merged"].path
    pieces = [
        Piece(name=d, function=united_piece, arguments={"name": d, "backbone": backbone, **common})
        for d in names
    ]
    return {name: done.path for name, done in run.run(pieces, "assembly").items()}


def merged_piece(
    *,
    out: Path,
    progress: Progress,
    models: Mapping[str, Path],
    segmentation: str | None,
    config: MergeConfig,
    anchor: str,
    max_shard_bytes: int,
) -> None:
    """The piece: all that is no FFN, token by token for embedding and head."""
    write_merged_backbone(
        models,
        union_of(models, segmentation),
        out,
        config=config,
        anchor=anchor,
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
