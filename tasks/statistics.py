"""Stage ``statistics``: (A_d, s_d, n_d) of one domain, in pieces of (text, shard)."""

from pathlib import Path

from infra.compute import Piece
from tasks.stage import StageRun, stage
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import domain_statistics, merge_statistics
from upcycle_core.progress import Progress

FILE = "{split}.safetensors"


@stage(
    "statistics/{domain}",
    inputs=lambda recipe, domain: [f"corpora/{domain}", f"experts/{domain}", "backbone"],
    params=("statistics", "compute.statistics", "domains.{domain}.elsewhere"),
    sources=(
        "upcycle_core/activations/capture.py",
        "upcycle_core/activations/moments.py",
        "upcycle_core/backbone/stitch.py",
        "upcycle_core/corpora/batches.py",
        "upcycle_core/corpora/mixture.py",
        "upcycle_core/corpora/seeded.py",
        "upcycle_core/dume/collect.py",
        "upcycle_core/dume/statistics.py",
    ),
    needed=lambda recipe: recipe.method == "dume",
)
def statistics(run: StageRun) -> None:
    """Write one file a calibration text: ``calibration`` and, where there is one, ``elsewhere``."""
    config = run.recipe.statistics
    splits = ["calibration"]
    if run.recipe.domains[run.domain].elsewhere is not None:
        splits.append("elsewhere")
    pieces = [
        Piece(
            name=f"{split}-{shard}",
            function=statistics_piece,
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
        merge_statistics(files, run.out / FILE.format(split=split))


def statistics_piece(
    *,
    out: Path,
    progress: Progress,
    backbone: Path,
    expert: Path,
    corpus: Path,
    config: StatisticsConfig,
    shard: int,
    device: str,
) -> None:
    """The piece: one shard of one text."""
    domain_statistics(
        backbone,
        expert,
        corpus,
        out,
        config=config,
        shard=shard,
        device=device,
        progress=progress,
    )
