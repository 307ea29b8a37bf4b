"""Logs of services that run for months: cut while they are written, with the last part kept."""

import os
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

LOG_BYTES = 16_000_000
"""What a log may grow to; as much of it stays beside it as ``NAME.log.1``."""
LOOK_SECONDS = 10.0
BLOCK_BYTES = 1_000_000


def bound_logs(folder: Path) -> None:
    """Cut the logs in a folder as they grow, in a thread that ends with this process."""
    Thread(target=_watch, args=(folder,), name="logs", daemon=True).start()


def cut(log: Path, *, beyond: int = LOG_BYTES) -> None:
    """Cut a log that is larger; its last part takes the place of what was kept beside it before.

    Who writes it goes on in the same file, if that is open to append. What is written between the
    last look and the cut is lost, and a line that is being written then may be broken.

    Args:
        log: It may be missing.
        beyond: Bytes that it may have, and that are kept of it.
    """
    with suppress(OSError), log.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= beyond:
            return
        file.seek(size - beyond)
        # A full disk keeps less: it has to get its room back.
        with suppress(OSError), log.with_name(f"{log.name}.1").open("wb") as kept:
            while block := file.read(BLOCK_BYTES):
                kept.write(block)
        file.truncate(0)


def _watch(folder: Path) -> None:
    while True:
        with suppress(OSError):  # no file can be opened now; the next look may
            for log in folder.glob("*.log"):
                cut(log)
        time.sleep(LOOK_SECONDS)
