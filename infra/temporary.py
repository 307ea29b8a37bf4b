"""Folders for a while that do not outlive their process for long: a killed one's are removed by the
next that makes one of its kind. And files by which others see that a process lives.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

OWNER = ".owner"
"""Held by the process that works in a folder; the kernel lets go of it however that ends."""


@contextmanager
def owned_folder(kind: str) -> Iterator[Path]:
    """An empty folder in the temporary directory, removed afterwards.

    Args:
        kind: What its name begins with; such folders of this user that nobody holds are removed.
    """
    remove_left(kind)
    with (
        tempfile.TemporaryDirectory(prefix=f"{kind}-", ignore_cleanup_errors=True) as name,
        hold(Path(name, OWNER)),
    ):
        inner = Path(name, "files")
        inner.mkdir()
        yield inner


def hold(place: Path) -> TextIO:
    """Make a file that this process holds until what is returned is closed."""
    place.parent.mkdir(exist_ok=True)
    made = place.with_name(f".{place.name}")
    file = made.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    made.rename(place)  # nobody takes it for one that a killed process has left
    return file


def remove_left(kind: str) -> None:
    """Remove folders of a kind whose processes are gone."""
    for mark in Path(tempfile.gettempdir()).glob(f"{kind}-*/{OWNER}"):
        folder = mark.parent
        with suppress(OSError):  # another one removes it, or may not be looked into
            if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
                continue
            with mark.open() as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
