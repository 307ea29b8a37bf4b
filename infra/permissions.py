"""Files and folders that another user owns, said in a line."""

import errno
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upcycle_core.errors import Fault, InputError

REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
ELSE = "name another one; that of all of this project's files is UPCYCLE_HOME"


@contextmanager
def permission_faults(field: str) -> Iterator[None]:
    """Turn what the system refuses meanwhile into an ``InputError`` that names the owner.

    Args:
        field: Where the place was given.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED or isinstance(error.filename, int | None):
            raise
        path = Path(os.fsdecode(error.filename))
        raise InputError(Fault(field, str(path), _remedy(path, error))) from error


def _remedy(path: Path, error: OSError) -> str:
    there, owner = _owner(path)
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        said = "lies on a file system that is mounted read-only"
        return f"{said}: have it mounted for writing, or {ELSE}"
    whose = "it belongs" if there == path else f"{there} belongs"
    return (
        f"{error.strerror}; {whose} to {_name(owner)}, and this is {_name(os.geteuid())}: run it "
        f"as the owner, have the place given to you (chown -R), or {ELSE}"
    )


def _owner(path: Path) -> tuple[Path, int]:
    """The innermost of a path and its folders that can be seen, and the id of its owner."""
    for place in (path, *path.absolute().parents):
        try:
            return place, place.stat().st_uid
        except OSError:
            continue
    raise AssertionError("the root can be seen")


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
