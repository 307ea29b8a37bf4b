"""What is on the disk when a function returns, whatever befalls the machine then."""

import errno
import os
from pathlib import Path

NO_SYNC = {errno.EACCES, errno.EBADF, errno.EINVAL}
"""What is said of a folder that this user may enter and not list, and by network file systems that
know no such call of folders."""


def sync(path: Path) -> None:
    """Bring a file's content, or the names in a folder where that can be asked, to the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in NO_SYNC or not path.is_dir():
            raise
