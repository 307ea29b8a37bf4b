"""What the C library's allocator keeps of the memory that is freed. Where it is not glibc, nothing
here changes anything.

Left alone, glibc gives much back to the kernel and faults it in again at the next batch (some
80 000 page faults a batch of a model of 135 million parameters), and keeps the rest for good.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Of mallopt(3)."""
LARGEST = 32 * 2**20
"""Bytes of a block that is kept, the most that glibc allows where it maps blocks at all."""
LARGE = 2**20
DEFAULT, DEFAULT_MAX = 128 * 1024, 65536
"""Of both thresholds, in bytes; of blocks that are mapped at once."""
NEVER = -1
"""A threshold that nothing reaches."""


@contextmanager
def kept_memory() -> Iterator[None]:
    """Within this context the process keeps what it frees, for the next batch; ``trim`` gives it
    back."""
    _set(TRIM_THRESHOLD, NEVER)
    _set(MMAP_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        _set(MMAP_THRESHOLD, DEFAULT)
        _set(TRIM_THRESHOLD, DEFAULT)


@contextmanager
def all_kept() -> Iterator[None]:
    """Within this context, in one of ``kept_memory``, blocks beyond ``LARGEST`` are kept too.

    For what asks for the same large blocks over and over, as the steps of a training do: logits and
    an embedding's gradient cost a third of a million page faults a step of a model of 135 million
    parameters. Where sizes change, holes would be held that nothing fits into.
    """
    _set(MMAP_MAX, 0)
    try:
        yield
    finally:
        _set(MMAP_MAX, DEFAULT_MAX)


def return_large_blocks() -> None:
    """Give every block of a megabyte back as it is freed, from now on.

    A worker that gathers layers and frees them would hold twice what it needs.
    """
    _set(MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Give back all that is freed."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)


def _set(option: int, value: int) -> None:
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    if call is not None:
        call(option, value)
