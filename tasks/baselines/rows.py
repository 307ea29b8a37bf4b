"""A row of a comparison, trained from its start."""

from pathlib import Path
from typing import Any

from tasks.engine.stage import StageRun
from tasks.scoring.architectures import register_architectures
from tasks.training import Instructions, train_from, train_piece


def train_row(
    run: StageRun, start: Path, *, domains: int, data: Instructions | None = None
) -> None:
    """Train the start of the row that ``run`` is of, see ``train_from``.

    Args:
        run: The stage.
        start: The checkpoint that ``start_of`` has made.
        domains: How many domains the row has, or labels of tasks.
        data: What it is trained on; the texts of all domains by default.
    """
    row = run.recipe.baselines[run.item]
    train_from(
        run,
        start,
        training=row.trained_as,
        # A dense model has neither routers nor experts.
        objective=row.objective if row.experts(domains) else None,
        domain_weights=row.objective.domain_weights,
        kind="baselines",
        data=data,
        function=row_piece,
    )


def row_piece(**arguments: Any) -> dict[str, Any]:
    """``train_piece`` of any row, BAM's too: another process may have made what it starts from."""
    register_architectures()
    return train_piece(**arguments)
