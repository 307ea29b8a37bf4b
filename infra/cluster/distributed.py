"""One piece on several workers: Ray Train's ``TorchTrainer``, as quiet as every other piece.

Each worker is a process that calls the same function with the same arguments, torch.distributed
ready: gloo on CPUs, nccl on GPUs.
"""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig

from infra.cluster.capacity import requested
from infra.cluster.private import (
    LoggingConfig,
    LoopbackConfig,
    QuietTrainer,
    RunConfig,
    ScalingConfig,
    WorkerHealthCheckFailedError,
)
from infra.cluster.worker import GROUP_FILE, Performed, WorkerLost, perform
from infra.durable import write_atomically
from infra.recipe.resources import Placement, Resources
from upcycle_core.errors import InputError


def perform_together(
    call: Callable[..., Any],
    *,
    workers: int,
    placement: Placement,
    resources: Resources,
    report: Path,
    folder: Path,
) -> Performed:
    """Call ``call`` in several processes at once.

    Args:
        call: Takes ``progress`` as a keyword argument.
        workers: How many processes.
        placement: Whether on as few machines as possible, or on as many.
        resources: What Ray reserves for each.
        report: The file that rank 0's progress goes to; the others are silent.
        folder: For Ray Train's own files, on storage that all workers share.

    Returns:
        What rank 0 returned, and the largest memory of any worker.

    Raises:
        WorkerLost: A worker died.
        Exception: What a worker raised, an ``InputError`` before all else.
    """

    def work() -> Any:
        rank = ray.train.get_context().get_world_rank()
        if rank == 0:
            group = ray.util.get_current_placement_group()
            assert group is not None  # Ray Train made it for these workers
            write_atomically(folder / GROUP_FILE, group.id.hex())
        result, peak = perform(call, report=report if rank == 0 else None, threads=resources.cpus)
        (folder / f"{rank}.peak").write_text(str(peak))
        return result

    alone = ray.util.get_node_ip_address().startswith("127.")
    trainer = QuietTrainer(
        work,
        torch_config=LoopbackConfig(folder / "meeting") if alone else TorchConfig(),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=resources.gpus > 0,
            resources_per_worker=requested(resources),
            placement_strategy=placement.upper(),
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder),
            logging_config=LoggingConfig(log_level="ERROR"),
            worker_runtime_env={"env_vars": _loopback_interface() if alone else {}},
        ),
    )
    try:
        result: Any = trainer.fit()  # Ray Train's own annotation is that of an older result
        peaks = [int(file.read_text()) for file in folder.glob("*.peak")]
        return Performed(result.return_value, max(peaks))
    except ray.train.WorkerGroupError as error:
        raise cause(error) from None


LOST_PARTNER = re.compile("Connection (closed|reset) by peer|ncclRemoteError")
"""What gloo and nccl say when another worker is gone."""


def _loopback_interface() -> dict[str, str]:
    """Left alone, gloo and nccl listen on the interface that the host's name leads to."""
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def cause(error: ray.train.WorkerGroupError) -> Exception:
    """What went wrong first: a worker whose partner failed fails too, for want of an answer."""
    failures = list(error.worker_failures.values())

    def lost_partner(failure: Exception) -> bool:
        return type(failure) is RuntimeError and LOST_PARTNER.search(str(failure)) is not None

    def rank_of(failure: Exception) -> int:
        kinds = (InputError, WorkerHealthCheckFailedError)
        for place, kind in enumerate(kinds):
            if isinstance(failure, kind):
                return place
        return len(kinds) + (type(failure) is RuntimeError) + lost_partner(failure)

    first = min(failures, key=rank_of)
    # A killed worker's partner may notice before Ray does; nobody has failed by itself then.
    if isinstance(first, WorkerHealthCheckFailedError) or lost_partner(first):
        return WorkerLost(str(error))
    first.add_note(str(error))
    return first
