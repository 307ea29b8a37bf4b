"""How much memory a process needs at its peak, and how much there is."""

import gc
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch

from infra.recipe.resources import Streamed
from upcycle_core.allocator import trim
from upcycle_core.memory import cores, total_memory

SAMPLE_SECONDS = 0.05
LEFT_BYTES = 64 * 2**20
"""What a call may leave behind in its process before the process is asked to give it back."""
GPU_SHARE = 0.92
"""Of a GPU's memory, what may be planned: its context, work space and the allocator's slack are in
no plan."""
_kept = 0  # by this process, when it was asked last
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Room:
    """What a piece may use of the memory of the machine that it runs on.

    Args:
        streamed: Whether it goes layer by layer, see ``infra.recipe.resources.PassResources``.
        cpus: Cores that it reserves, as do those beside it.
        gpus: GPUs that it reserves.
        machine_cpus: Cores that Ray was given; None for all there are.
        memory: Bytes that it reserves, as do those beside it; None for none.
        pieces: How many there are with it, at most: no more run at once, however many cores there
            are. None where that is not known.
    """

    streamed: Streamed
    cpus: int
    gpus: float
    machine_cpus: int | None
    memory: int | None = None
    pieces: int | None = None

    def holds(self, needed: Callable[[], int], device: str) -> bool:
        """Whether the model is held: always, never, or where its share of the memory allows it.

        Args:
            needed: Says how many bytes that takes, beside what the process holds now.
            device: Where it computes.
        """
        if self.streamed != "auto":
            return self.streamed == "never"
        there = machine_memory(device) or 0
        if device != "cpu":
            return needed() <= GPU_SHARE * there * min(1.0, self.gpus)
        places = max(1, (self.machine_cpus or cores()) // self.cpus)
        if self.memory is not None:
            places = max(1, min(places, there // self.memory))
        if self.pieces is not None:
            places = min(places, self.pieces)
        return places * (needed() + held_bytes()) <= there


class PeakMemory:
    """The most memory that this process held between entering and leaving.

    On a GPU that is used, what torch's allocator gave at most; else anonymous memory, sampled, what
    the process held before included (files that are only mapped are not; where there is no /proc,
    they are).
    """

    def __enter__(self) -> "PeakMemory":
        _clear_away()  # an earlier call's garbage is not this one's memory
        for device in _devices():
            torch.cuda.reset_peak_memory_stats(device)
        self._sampled = held_bytes()
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._watcher.join()
        self._sampled = max(self._sampled, held_bytes())

    @property
    def bytes(self) -> int:
        """The peak."""
        on_gpu = max((torch.cuda.max_memory_allocated(device) for device in _devices()), default=0)
        return on_gpu or self._sampled

    def _watch(self) -> None:
        while not self._left.wait(SAMPLE_SECONDS):
            self._sampled = max(self._sampled, held_bytes())


@cache
def set_libraries_aside() -> None:
    """Let collections of garbage pass over what a process holds before its first call; once.

    Looking through all that torch brings takes a tenth of a second, which is many tiny pieces'
    time. Later there may be garbage among what is held, and it would stay.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Return what calls have left of their memory to the machine, if that is much.

    A process of Ray's waits for its next call as long as its flow lives. What a call leaves in
    cycles is freed at some later time; what is freed the C library keeps for itself. Looking for
    little would take longer than tiny pieces do; what is left on a GPU is not seen from here.
    """
    global _kept
    _kept = _left()


def _clear_away() -> None:
    """As ``give_back``, before a call: what a failed one's traceback still holds is not kept."""
    global _kept
    _kept = min(_kept, _left())


def _left() -> int:
    """What stays with this process of what it held when it was asked last, or has come to since."""
    held = held_bytes()
    if held - _kept < LEFT_BYTES and not _devices():
        return min(_kept, held)
    gc.collect()
    trim()
    return held_bytes()


def machine_memory(device: str) -> int | None:
    """Bytes that this machine, its container or one of its GPUs has; None where it has no GPU."""
    if device != "cpu":
        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_properties(device).total_memory
    return total_memory()


def _devices() -> range:
    """The GPUs, once this process has used one."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def held_bytes() -> int:
    """Anonymous memory of this process now; where there is no /proc, mapped files as well."""
    if STATUS.exists():
        found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
        if found:
            return 1024 * int(found.group(1))
    return psutil.Process().memory_info().rss
