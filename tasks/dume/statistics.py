"""Stage ``statistics``: (A_d, s_d, n_d) of one domain, in pieces of (text, shard)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.cluster.memory import Room
from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.data.asked import say_lacking
from tasks.dume.files import STATISTICS, calibration_splits, solved_on
from tasks.engine.stage import StageRun, stage
from tasks.scoring.room import room_of, statistics_folder
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import domain_statistics, merge_statistics
from upcycle_core.progress import Progress


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    texts = [f"corpora/{domain}/{split}" for split in calibration_splits(recipe, domain)]
    return [*texts, solved_on(recipe, domain), "backbone"]


@stage("statistics/{domain}", _inputs, params=("statistics",))
def statistics(run: StageRun) -> None:
    """Write one file a calibration text: ``calibration`` and, where there is one, ``elsewhere``."""
    models: dict[str, Any] = {
        "room": room_of(run.recipe.compute, "statistics"),
        "backbone": run.path("backbone"),
        "expert": run.path(solved_on(run.recipe, run.domain)),
    }
    texts = {
        split: {**models, "corpus": run.path(f"corpora/{run.domain}/{split}")}
        for split in calibration_splits(run.recipe, run.domain)
    }
    corpora = {f"{run.domain}/{split}": own["corpus"] for split, own in texts.items()}
    say_lacking(run, corpora, run.recipe.statistics.tokens, key="statistics.tokens")
    for split, file in in_shards(run, statistics_piece, texts).items():
        file.rename(run.out / STATISTICS.format(split=split))


def statistics_piece(
    *,
    out: Path,
    expert: Path,
    room: Room,
    config: StatisticsConfig,
    device: str,
    **common: Any,
) -> None:
    """The piece: statistics of one shard, the model held or layer by layer."""
    how: dict[str, Any] = {"config": config, "device": device}
    folder = statistics_folder(room, out, expert, **how)
    domain_statistics(out=out, expert=expert, streamed=folder, **how, **common)


def in_shards(
    run: StageRun, function: Callable[..., None], texts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Path]:
    """Statistics of several texts, each computed in shards and summed.

    Args:
        run: The stage's run; its pieces are (text, shard).
        function: Writes the statistics of one shard.
        texts: What it is given for each text, beside the recipe's ``statistics``.

    Returns:
        A file a text.
    """
    config = run.recipe.statistics
    common = {"config": config, "device": run.device("statistics")}
    pieces = [
        Piece.of(f"{name}-{shard}", function, shard=shard, **arguments, **common)
        for name, arguments in texts.items()
        for shard in range(config.shards)
    ]
    done = run.run(pieces, "statistics")
    sums = {
        name: Piece.of(
            f"{name}-merged",
            merge_piece,
            shards=[done[f"{name}-{shard}"].path for shard in range(config.shards)],
        )
        for name in texts
    }
    merged = run.run(list(sums.values()), "statistics", uses_gpu=False)
    return {name: merged[piece.name].path for name, piece in sums.items()}


def merge_piece(*, out: Path, progress: Progress, shards: Sequence[Path]) -> None:
    """The piece: the sum of a text's shards, in their order."""
    merge_statistics(shards, out)
