"""What we use of Ray Train that Ray does not promise to keep. Checked with Ray 2.60.

Nothing else of ours names these. ``USES`` says what each is for; a test asks for every one, so that
an upgrade that has moved it is told what to look for.
"""

from pathlib import Path
from typing import Any

import ray
import torch.distributed
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.config import LoggingConfig, RunConfig, ScalingConfig
from ray.train.v2.torch.torch_trainer import TorchTrainer

__all__ = [
    "LoggingConfig",
    "LoopbackConfig",
    "QuietTrainer",
    "RunConfig",
    "ScalingConfig",
    "WorkerHealthCheckFailedError",
]
TYPED = "is what ray.train hands out; type checkers see an older class under that name"
USES = {
    "ray.train.torch.config:_set_torch_distributed_env_vars": "tells each worker its rank",
    "ray.train.torch.config:_TorchBackend": "workers on loopback meet in a file, not at a port",
    "ray.train.torch.config:_TorchBackend.on_start": "where torch's process group is made",
    "ray.train.torch.config:TorchConfig.backend_cls": "where a trainer asks for its backend",
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback": (
        "is left out: it asks a dashboard that our local Ray does not have, and never ends"
    ),
    "ray.train.v2._internal.exceptions:WorkerHealthCheckFailedError": (
        "tells a killed worker, whose piece is run again, from one that failed"
    ),
    "ray.train.v2._internal.execution.worker_group.execution_group:ExecutionGroup.execute": (
        "calls a function on every worker"
    ),
    "ray.train.v2._internal.execution.worker_group.execution_group"
    ":ExecutionGroup.execute_single_async": "calls a function on one worker",
    "ray.train.v2.api.config:LoggingConfig": TYPED,
    "ray.train.v2.api.config:RunConfig": TYPED,
    "ray.train.v2.api.config:ScalingConfig": TYPED,
    "ray.train.v2.torch.torch_trainer:TorchTrainer": TYPED,
    "ray.train.v2.torch.torch_trainer:TorchTrainer._create_default_callbacks": (
        "what a trainer does beside training; PlacementGroupCleanerCallback is taken out"
    ),
}
"""{module:name: what it is for}."""


class QuietTrainer(TorchTrainer):
    """Without a detached actor that would give back what Ray reserved.

    ``infra.cluster.compute`` does that.

    It asks Ray's dashboard whether it is needed; our local Ray has none, and it would never end.
    """

    def _create_default_callbacks(self) -> list:
        callbacks = super()._create_default_callbacks()
        return [c for c in callbacks if not isinstance(c, PlacementGroupCleanerCallback)]


class LoopbackConfig(TorchConfig):
    """Torch on a Ray that listens on loopback alone.

    Args:
        meeting: A file in which the workers find each other.
    """

    def __init__(self, meeting: Path) -> None:
        super().__init__()
        self.meeting = meeting

    @property
    def backend_cls(self) -> type:
        return _LoopbackBackend


class _LoopbackBackend(_TorchBackend):
    """Ray's, but the workers meet in a file: torch's TCP store listens on every interface."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_set_torch_distributed_env_vars)
        size = len(worker_group)
        place = f"file://{backend_config.meeting}"
        ray.get(
            [
                worker_group.execute_single_async(i, _join, backend_config.backend, place, i, size)
                for i in range(size)
            ]
        )


def _join(backend: str, place: str, rank: int, size: int) -> None:
    torch.distributed.init_process_group(backend, place, rank=rank, world_size=size)
