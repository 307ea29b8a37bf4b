"""What stages cost: time and memory of their pieces. Kept beside artifacts, never in them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from infra.cluster.pieces import Done
from infra.durable import write_atomically
from tasks.engine.workspace import Workspace

FOLDER = ".costs"


@dataclass(frozen=True)
class Cost:
    """What pieces took.

    Args:
        core_seconds: Their own time times their CPU cores, summed.
        peak_memory_bytes: Peak anonymous memory of the largest, its interpreter and libraries
            included; on a GPU the allocator's.
    """

    core_seconds: float = 0.0
    peak_memory_bytes: int = 0

    @classmethod
    def together(cls, costs: Sequence["Cost"]) -> "Cost":
        """All of ``costs``: times add up, memory is that of the largest."""
        return cls(
            sum(cost.core_seconds for cost in costs),
            max((cost.peak_memory_bytes for cost in costs), default=0),
        )


def cost_of(piece: Done, cpus: int) -> Cost:
    """The cost of one piece; a training that was killed counts what it trained before as well."""
    seconds = piece.ended - piece.started
    if isinstance(piece.result, dict):
        seconds = max(seconds, piece.result.get("seconds", 0.0))
    return Cost(seconds * cpus, piece.peak_memory_bytes)


def write_cost(workspace: Workspace, label: str, cost: Cost) -> None:
    """Remember what the stage ``label`` cost when it last ran."""
    folder = workspace.path(FOLDER)
    folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{label}.json", json.dumps(asdict(cost)) + "\n")


def read_cost(workspace: Workspace, label: str) -> Cost | None:
    """What ``label`` cost; None where its result came from elsewhere, or a disk damaged this."""
    path = workspace.path(FOLDER) / f"{label}.json"
    try:
        values = json.loads(path.read_text())
        return Cost(values["core_seconds"], values["peak_memory_bytes"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
