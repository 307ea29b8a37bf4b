"""Whether a piece holds its model or goes layer by layer: decided where it runs."""

from pathlib import Path

from infra.cluster.calls import are_made_there
from infra.cluster.memory import Room
from infra.recipe.resources import ComputeConfig, PassResources
from upcycle_core.architectures.families import FAMILIES, STOCK_MOES
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.evaluation.text.config import EvaluationConfig

STREAMABLE = frozenset(FAMILIES) | STOCK_MOES


def room_of(compute: ComputeConfig, kind: str) -> Room:
    """What a recipe allows pieces of a kind that can go layer by layer.

    Its ``compute.cpus`` are those of a local Ray: a cluster's machines have their own.
    """
    resources: PassResources = getattr(compute, kind)
    return Room(
        streamed=resources.streamed,
        cpus=resources.cpus,
        gpus=resources.gpus,
        machine_cpus=None if are_made_there() else compute.cpus,
        memory=resources.memory,
    )


def scoring_folder(
    room: Room | None, out: Path, model: Path, *, config: EvaluationConfig, device: str
) -> Path | None:
    """Where a model's hidden states lie while it is scored; None if it is held.

    Models of kinds that are not known are held, whatever the room.

    Args:
        room: What the piece may use; without, as much as it takes.
        out: The piece's own; what lies beside it outlives a kill.
        model: A checkpoint, of the size of what is scored.
        config: What is scored.
        device: Where it runs.
    """
    if room is None:
        return None
    reader = CheckpointReader(model, field="model", integers=True)
    if reader.config.get("model_type") not in STREAMABLE:
        return None
    from upcycle_core.planning.memory import scoring_bytes  # takes a second

    holds = room.holds(lambda: scoring_bytes(reader, config, device=device), device)
    return None if holds else _beside(out)


def statistics_folder(
    room: Room, out: Path, expert: Path, *, config: StatisticsConfig, device: str
) -> Path | None:
    """The same of the statistics pass of one expert."""
    from upcycle_core.planning.memory import statistics_bytes
    from upcycle_core.planning.shape import Shape

    holds = room.holds(lambda: statistics_bytes(Shape.of(expert), config, device=device), device)
    return None if holds else _beside(out)


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.layers")
