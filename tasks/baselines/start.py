"""The piece that writes what a published way of upcycling is trained from."""

from collections.abc import Mapping
from pathlib import Path

from upcycle_core.baselines.config import Baseline
from upcycle_core.baselines.start import write_start
from upcycle_core.dume.router_reader import load_routers
from upcycle_core.progress import Progress


def start_piece(
    *,
    out: Path,
    progress: Progress,
    baseline: Baseline,
    copies: int,
    seed: int,
    max_shard_bytes: int,
    experts: Mapping[str, Path] | None = None,
    seed_model: Path | None = None,
    backbone: Path | None = None,
    routers: Path | None = None,
) -> None:
    """The piece: the checkpoint that training starts from, of what its method needs."""
    write_start(
        baseline,
        out,
        experts=experts,
        seed_model=seed_model,
        backbone=backbone,
        routers=None if routers is None else load_routers(routers).weights,
        copies=copies,
        seed=seed,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
