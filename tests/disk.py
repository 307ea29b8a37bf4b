"""What the disk of the tests can do."""

import fcntl
import tempfile
from pathlib import Path

from upcycle_core.checkpoints.copy import CLONE


def shares_blocks(folder: Path) -> bool:
    """Whether the file system lets a file share the blocks of another: there, links are none."""
    with (
        tempfile.TemporaryFile(dir=folder) as one,
        tempfile.TemporaryFile(dir=folder) as other,
    ):
        one.write(b"content" * 50_000)
        one.flush()
        try:
            fcntl.ioctl(other.fileno(), CLONE, one.fileno())
        except OSError:
            return False
    return True
