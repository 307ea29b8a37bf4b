"""Stage ``united``: the strangers as they are, over one vocabulary: what naive joining reads.

Embedding and head of each become the merged ones, so that all have the same rows; the rest is each
model's own.
"""

from collections.abc import Sequence
from pathlib import Path

from infra.cluster.pieces import Piece
from tasks.engine.stage import StageRun, each, stage
from tasks.engine.workspace import take
from tasks.symphony.vocabulary import merged_backbone
from upcycle_core.symphony.config import MergeConfig
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
        (run.out / name).mkdir()
        take(path, run.out / name)


def lifted(
    run: StageRun, names: Sequence[str], *, config: MergeConfig, anchor: str
) -> dict[str, Path]:
    """Models over the union's vocabulary, with the rows that ``config`` gives it."""
    models = {name: run.path(f"experts/{name}") for name in run.recipe.domains}
    # No domain's name begins like this.
    merged = merged_backbone(run, "_merged", models, config=config, anchor=anchor)
    common = {"backbone": merged, "max_shard_bytes": run.recipe.moe.max_shard_bytes}
    pieces = [Piece.of(name, write_united, model=models[name], **common) for name in names]
    return {name: done.path for name, done in run.run(pieces, "assembly").items()}
