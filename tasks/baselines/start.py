"""The piece that writes what a row's training starts from."""

from pathlib import Path
from typing import Any

from tasks.engine.stage_run import StageRun
from upcycle_core.baselines.config import Baseline
from upcycle_core.baselines.start import write_start


def start_of(run: StageRun, row: Baseline, kind: str, *, domains: int, **parts: Any) -> Path:
    """Where the checkpoint lies that a row's training starts from.

    Args:
        run: The stage.
        row: The row.
        kind: Of the resources; it computes on the CPU.
        domains: How many there are: copies of one FFN are as many where the row does not say.
        **parts: The models that it is made of, and how; see ``write_start``.
    """
    return run.done(
        "start",
        write_start,
        kind,
        uses_gpu=False,
        baseline=row,
        copies=row.experts(domains),
        seed=run.recipe.seed,
        max_shard_bytes=run.recipe.moe.max_shard_bytes,
        **parts,
    ).path
