"""Groups of worker processes that make the same calls, on gloo.

They are forked from a process of their own, which imports everything once and has no threads.
"""

import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

from tests import warm
from tests.upcycle_core.training.runs import Recorder, run
from upcycle_core.errors import InputError


@dataclass(frozen=True)
class Group:
    """Workers and what all of them call.

    Args:
        count: How many.
        calls: Each a model, a name and what ``how`` is told; one after the other.
        how: A function of a module.
        is_killed: Whether one of them kills itself; the others are ended then.
    """

    count: int
    calls: Sequence[tuple[Path, str, dict]]
    how: Callable = run
    is_killed: bool = False


def together(folder: Path, *groups: Group) -> None:
    """Let the workers of each group call, a group after the other."""
    plan = folder / "plan"
    plan.write_bytes(pickle.dumps((folder, groups)))
    script = (
        "import sys; from tests.upcycle_core.training import together as t; t.main(sys.argv[1])"
    )
    warm.call(script, str(plan), OMP_NUM_THREADS="1")


def said(folder: Path, name: str, rank: int = 0):
    """What a worker's call returned and what it reported."""
    return torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


def main(plan: str) -> None:
    """Fork the groups."""
    folder, groups = pickle.loads(Path(plan).read_bytes())
    torch.set_num_threads(1)
    for group in groups:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = {_fork(rank, port, folder, group) for rank in range(group.count)}
        codes = []
        while children:
            child, status = os.wait()
            children.remove(child)
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1] and len(codes) == 1:
                for other in children:
                    os.kill(other, signal.SIGTERM)
        if group.is_killed:  # the others may see it gone, and end, before it is waited for
            assert -signal.SIGKILL in codes, codes
            assert 0 not in codes, codes
        else:
            assert not any(codes), codes


def _fork(rank: int, port: int, folder: Path, group: Group) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _work(rank, port, folder, group)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _work(rank: int, port: int, folder: Path, group: Group) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group.count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=group.count
    )
    for model, name, options in group.calls:
        recorder = Recorder()
        try:
            result = group.how(folder, model, name, progress=recorder, **options)
        except (InputError, FloatingPointError):
            result = traceback.format_exc()
        torch.save((result, recorder.points), folder / f"{name}-{rank}.pt")
    distributed.destroy_process_group()
