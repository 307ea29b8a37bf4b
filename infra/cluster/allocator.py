"""The C library's allocator as pieces that compute with torch want it.

glibc gives freed memory back to the kernel and faults it in again at the next batch: some 80 000
page faults a batch of a model of 135 million parameters.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
LARGEST = 32 * 2**20
"""Bytes of what is kept, the most that glibc allows: larger blocks would not fit into gaps."""
NEVER = 2**31 - 1


@contextmanager
def kept_memory() -> Iterator[None]:
    """Within this context the process keeps what it frees; behind it the kernel has it back.

    Where the C library is not glibc, nothing changes.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(TRIM_THRESHOLD, NEVER)
    library.mallopt(MMAP_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        library.mallopt(MMAP_THRESHOLD, 128 * 1024)
        library.mallopt(TRIM_THRESHOLD, 128 * 1024)
        library.malloc_trim(0)
