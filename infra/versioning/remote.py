"""A DVC remote that is a directory: what is pushed there is on the disk, and stays whole.

DVC copies without waiting for the disk, and takes whatever has an object's name for the object.
What a power cut left short would stay so, whatever is pushed later.
"""

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from infra.versioning.cache import OBJECTS, run_dvc
from upcycle_core.durable import sync

LEFT_SECONDS = 24 * 3600
OBJECT = re.compile(r"[0-9a-f]{30}(\.dir)?")
"""Its name below the folder of its first two digits; another workspace's DVC writes beside it."""


def push_to(root: Path, remote: Path) -> subprocess.CompletedProcess[str]:
    """Run ``dvc push`` to a directory, and bring what it has sent to the disk.

    Args:
        root: The workspace, whose lock is held; its settings name the remote.
        remote: The directory.
    """
    mend(root, remote)
    before = set(_objects(remote))
    done = run_dvc(root, "push")
    sent = [name for name in _objects(remote) if name not in before]
    for name in sent:
        with suppress(FileNotFoundError):  # another workspace's, which tidied meanwhile
            sync(remote / OBJECTS / name)
    if sent:
        objects = remote / OBJECTS
        folders = {(objects / name).parent for name in sent}
        for folder in (*folders, objects, objects.parent, remote, remote.parent):
            sync(folder)
    return done


def mend(root: Path, remote: Path) -> None:
    """Write the objects of which a remote has another size than the cache there once more.

    What a killed DVC was writing a day ago is removed.

    Args:
        root: The workspace, whose lock is held.
        remote: The directory; it may be missing.
    """
    cache = root / ".dvc" / "cache"
    for name in set(_objects(cache)) & set(_objects(remote)):
        kept, sent = cache / OBJECTS / name, remote / OBJECTS / name
        if kept.stat().st_size != sent.stat().st_size and _is_whole(kept):
            partial = sent.with_name(f".{sent.name}.{os.getpid()}")
            shutil.copyfile(kept, partial)
            shutil.copymode(sent, partial)
            sync(partial)
            partial.replace(sent)
            sync(sent.parent)
    _remove_left(remote)


def _remove_left(remote: Path) -> None:
    """Remove what a killed DVC was writing; younger files may be another workspace's at work."""
    for file in (remote / OBJECTS).glob("??/.*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > LEFT_SECONDS:
                file.unlink()


def _objects(place: Path) -> Iterator[str]:
    """Names of objects: ``ab/cdef...``."""
    found = (place / OBJECTS).glob("??/*")
    return (f"{f.parent.name}/{f.name}" for f in found if OBJECT.fullmatch(f.name))


def _is_whole(kept: Path) -> bool:
    with kept.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == kept.parent.name + kept.stem
