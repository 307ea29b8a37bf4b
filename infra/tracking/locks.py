"""A lock between processes that is waited for in words, and no longer than a flow may work."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from infra.cluster.calls import heed

TRY_SECONDS = 0.2
SILENT_SECONDS = 1.0
_logger = logging.getLogger(__name__)


@contextmanager
def locked(file: Path, waits: str) -> Iterator[None]:
    """Hold the lock of a file until the block ends, or the process.

    Args:
        file: Made where it is not there; its folder is.
        waits: Logged once where another one holds it for longer than a moment.

    Raises:
        BaseException: What a check of ``heeding`` raises while another one holds it.
    """
    begun, is_said = time.monotonic(), False
    with file.open("w") as lock:
        while not _is_ours(lock):
            heed()
            if not is_said and time.monotonic() - begun > SILENT_SECONDS:
                _logger.warning(waits)
                is_said = True
            time.sleep(TRY_SECONDS)
        yield


def _is_ours(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
