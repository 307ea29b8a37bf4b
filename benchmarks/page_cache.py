"""What the kernel has read of files: all of it, by whatever call, mapped files included."""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def weights_below(*folders: Path) -> Iterator[Path]:
    """Files of weights in folders and all below them, each inode once."""
    seen = set()
    for folder in folders:
        for file in sorted(folder.rglob("*.safetensors")):
            status = file.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                yield file


def forget(files: Iterable[Path]) -> None:
    """Let the kernel drop what it holds of files.

    Raises:
        RuntimeError: It keeps some: another process maps it.
    """
    os.sync()
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if kept := held_bytes(file):
            raise RuntimeError(f"{kept} bytes of {file} stay in memory; who maps it?")


def held_bytes(file: Path) -> int:
    """What the kernel holds of a file: after ``forget`` all that was read of it, in pages."""
    size = file.stat().st_size
    if not size:
        return 0
    libc, held = ctypes.CDLL(None, use_errno=True), (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(size), held)
        del first  # or the map cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}")
    return sum(page & 1 for page in held) * mmap.PAGESIZE
