"""Stage ``statistics``: (A_d, s_d, n_d) of one domain, in pieces of (text, shard)."""

from infra.cluster.compute import Piece
from infra.recipe.schema import Recipe
from tasks.dume.files import STATISTICS, calibration_splits
from tasks.engine.stage import StageRun, stage
from upcycle_core.dume.statistics import domain_statistics, merge_statistics


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    texts = [f"corpora/{domain}/{split}" for split in calibration_splits(recipe, domain)]
    return [*texts, f"experts/{domain}", "backbone"]


@stage(
    "statistics/{domain}",
    inputs=_inputs,
    params=("statistics",),
)
def statistics(run: StageRun) -> None:
    """Write one file a calibration text: ``calibration`` and, where there is one, ``elsewhere``."""
    config = run.recipe.statistics
    splits = calibration_splits(run.recipe, run.domain)
    pieces = [
        Piece(
            name=f"{split}-{shard}",
            function=domain_statistics,
            arguments={
                "backbone": run.path("backbone"),
                "expert": run.path(f"experts/{run.domain}"),
                "corpus": run.path(f"corpora/{run.domain}/{split}"),
                "config": config,
                "shard": shard,
                "device": run.device("statistics"),
            },
        )
        for split in splits
        for shard in range(config.shards)
    ]
    done = run.run(pieces, "statistics")
    for split in splits:
        files = [done[f"{split}-{shard}"].path for shard in range(config.shards)]
        merge_statistics(files, run.out / STATISTICS.format(split=split))
