"""Stage ``united``: the strangers as they are, over one vocabulary: what naive joining reads.

Embedding and head of each become the merged ones, so that all have the same rows; the rest is each
model's own.
"""

from collections.abc import Sequence
from pathlib import Path

from infra.cluster.pieces import Piece
from tasks.engine.stage import StageRun, each, stage
from tasks.symphony.vocabulary import union_arguments, union_of
from upcycle_core.symphony.config import MergeConfig
from upcycle_core.symphony.merge import write_merged_backbone
from upcycle_core.symphony.unite import write_united

MEAN = MergeConfig(embeddings="mean", attention="mean", norms="mean")
ALONE = MergeConfig(embeddings="anchor", attention="anchor", norms="anchor")


@stage(
    "united",
    lambda recipe, item: each(recipe, "experts/{domain}"),
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
    largest = run.recipe.moe.max_shard_bytes
    models = {name: run.path(f"experts/{name}") for name in run.recipe.domains}
    merged = run.done(
        "merged",
        write_merged_backbone,
        "assembly",
        models=models,
        union=union_of(**union_arguments(run)),
        config=config,
        anchor=anchor,
        max_shard_bytes=largest,
    )
    common = {"backbone": merged.path, "max_shard_bytes": largest}
    pieces = [Piece.of(name, write_united, model=models[name], **common) for name in names]
    return {name: done.path for name, done in run.run(pieces, "assembly").items()}
