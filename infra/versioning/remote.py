"""A DVC remote that is a directory: what is pushed there is on the disk, and stays whole.

DVC copies without waiting for the disk, and takes whatever has an object's name for the object.
What a power cut left short would stay so, whatever is pushed later.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from infra.durable import read_json, write_atomically
from infra.versioning.cache import OBJECTS, run_dvc
from upcycle_core.durable import sync
from upcycle_core.errors import Fault, raise_faults

LEFT_SECONDS = 24 * 3600
PUSHED = ".pushed.json"
"""In a workspace: the directory that was pushed to last, and the disk that it was on."""
OBJECT = re.compile(r"[0-9a-f]{30}(\.dir)?")
"""Its name below the folder of its first two digits; another workspace's DVC writes beside it."""


def push_to(root: Path, remote: Path) -> subprocess.CompletedProcess[str]:
    """Run ``dvc push`` to a directory, and bring what it has sent to the disk.

    Args:
        root: The workspace, whose lock is held; its settings name the remote.
        remote: The directory.

    Raises:
        InputError: The disk that it was on is not there.
    """
    raise_faults(_unmounted_faults(root, remote))
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
    if done.returncode == 0:
        with suppress(OSError):  # a full disk: what was pushed is there all the same
            write_atomically(root / PUSHED, json.dumps(_place(root, remote)))
    return done


def _place(root: Path, remote: Path) -> dict[str, str | int]:
    """A directory and its disk; of one that is not there, the disk that it would be made on.

    One in the workspace's home is named from there, so that it may move with it.
    """
    home = root.parent
    named = remote.relative_to(home) if remote.is_relative_to(home) else remote
    there = next(path for path in (remote, *remote.parents) if os.path.exists(path))
    return {"remote": str(named), "disk": there.stat().st_dev}


def _unmounted_faults(root: Path, remote: Path) -> Iterator[Fault]:
    """A directory that was pushed to and is empty now, on another disk: DVC would send there, where
    the disk of before hides it again, and the next versions alone would be on that."""
    last, now = read_json(root / PUSHED), _place(root, remote)
    is_other = isinstance(last, dict) and last != now and last.get("remote") == now["remote"]
    if is_other and not any(_objects(remote)):
        remedy = "holds nothing, on another disk than at the last push: mount that one, and run "
        remedy += f"the same again; or delete {root / PUSHED}, to begin a new remote there"
        yield Fault("versions.remote", str(remote), remedy)


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
