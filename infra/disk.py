"""A full disk, as the system and libraries say it: one error, which says what to do."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upcycle_core.errors import FULL, Fault, InputError

LEAST = 10**6
"""Bytes with which the databases of Prefect and MLflow take another run."""
FULL_SAID = re.compile(
    rf"os error ({'|'.join(map(str, sorted(FULL)))})\b"  # safetensors, tokenizers
    r"|unexpected pos \d+ vs|PytorchStreamWriter failed writing"  # torch
    r"|\d+ requested and \d+ written"  # numpy
    r"|database or disk is full"  # SQLite
)
"""What libraries say of them that pass on no error of the system."""


@contextmanager
def disk_faults(field: str, path: Path) -> Iterator[None]:
    """Turn a full disk, here or where a piece ran, into an error that says so."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        remedy = f"{_said(path)}; free some space and run the same command again: finished pieces "
        raise InputError(Fault(field, str(path), f"{remedy}are kept")) from error


def is_full_disk(error: BaseException) -> bool:
    """Whether that is the error, or what a worker raised, which Ray carries as its cause."""
    carried = getattr(error, "cause", None)
    if isinstance(carried, BaseException):
        return is_full_disk(carried)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return FULL_SAID.search(str(error)) is not None


def home_faults(home: Path) -> Iterator[Fault]:
    """A home on whose disk no database takes another run: said before one is asked to."""
    if _free(home) < LEAST:
        yield full_home(home)


def full_home(home: Path) -> Fault:
    """A full disk of the home, or of temporary files where it is that one.

    Args:
        home: It may be missing.
    """
    temporary = Path(tempfile.gettempdir())
    if _free(temporary) < LEAST <= _free(home):
        remedy = f"{_said(temporary)}; free some space there, or set TMPDIR to another folder"
        return Fault("TMPDIR", str(temporary), remedy)
    remedy = f"{_said(home)}, and the databases of Prefect and MLflow need a few MB: delete "
    remedy += "something of your own there, then python -m flows.tidy RECIPE shows what else may "
    remedy += "go; or set this to a folder on a larger disk. What is finished is kept"
    return Fault("UPCYCLE_HOME", str(home), remedy)


def _said(path: Path) -> str:
    return f"the disk is full ({_free(path) / 1e6:.0f} MB free), or a file larger than allowed"


def _free(path: Path) -> int:
    """Bytes on the disk of a path that may be missing."""
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    return shutil.disk_usage(there).free
