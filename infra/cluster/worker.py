"""One call in a worker process: with its threads, its progress, and an eye on its memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from infra.cluster.progress import FileProgress
from upcycle_core.progress import Silent

GROUP_FILE = "group"
"""Holds the id of what Ray reserved for several workers, in a folder of theirs."""
# Of the tasks that start several workers, and so of their workers. Left alone, Ray Train watches
# for machines that a cloud takes back, looks after its workers every two seconds only, replaces
# print, and lets workers run in a folder of its own.
TRAIN_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


class Performed(NamedTuple):
    """What a call returned, and the most memory that a process held during it."""

    result: Any
    peak_memory_bytes: int


class WorkerLost(RuntimeError):
    """A process died under its call: nothing speaks against running it again."""


def perform(call: Callable[..., Any], *, report: Path | None, threads: int) -> Performed:
    """Call ``call`` with a ``progress``.

    Args:
        call: Takes ``progress`` as a keyword argument.
        report: The file that progress goes to; ``None`` where another process reports.
        threads: How many torch computes with.
    """
    import torch  # seconds; the flow that sends pieces does without

    from infra.cluster.memory import PeakMemory, give_back, set_libraries_aside
    from upcycle_core.allocator import kept_memory

    set_libraries_aside()
    torch.set_num_threads(threads)
    progress = FileProgress(report) if report else Silent()
    with kept_memory(), PeakMemory() as memory:
        result = call(progress=progress)
    give_back()  # what a failed call leaves is held by its traceback until the next one
    if isinstance(progress, FileProgress):
        progress.finish()
    return Performed(result, memory.bytes)
