"""Copying a checkpoint: what belongs to the model, and nothing else, and bytes once where it can.

A file system that shares blocks (Btrfs, XFS, ZFS, Ceph, NFS 4.2) keeps a copy for nothing, and each
of the two may change alone. A hard link is one file under two names: for what nobody writes to.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from upcycle_core.checkpoints.given_as import GIVEN_AS
from upcycle_core.errors import raise_faults

TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates that are asked for by name (``tool_use``, ``rag``), in a folder of their own."""
PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    TEMPLATES,
    GIVEN_AS,
)


WEIGHTS = ".safetensors"
CLONE = 0x40049409
"""FICLONE of Linux: let a file share all blocks of another."""


def belongs(name: str) -> bool:
    """Whether a file of a directory, by its relative path, may be part of the checkpoint there."""
    patterns = (*PATTERNS, f"*{WEIGHTS}", f"*{WEIGHTS}.index.json")
    return any(name.count("/") == p.count("/") and fnmatchcase(name, p) for p in patterns)


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of ``source``; on the disk once where the file system shares blocks.

    It is never a link: who owns ``source`` may write to it, or make it read-only.
    """
    if not _cloned(source, target):
        shutil.copyfile(source, target)


def link_file(source: Path, target: Path) -> None:
    """Give a file that nobody writes to a second place, on the disk once where that can be.

    Args:
        source: Whole; it is replaced, never written to.
        target: What lies there is replaced: a copy that is tried again finds its own links.
    """
    if _cloned(source, target):
        return
    target.unlink()
    try:
        os.link(source.resolve(), target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def _cloned(source: Path, target: Path) -> bool:
    """Whether ``target`` shares the blocks of ``source`` now; it is an empty file else.

    A file of its own, never what lies there: that may be the source under another name.
    """
    target.unlink(missing_ok=True)
    with source.open("rb") as read, target.open("wb") as written:
        try:
            fcntl.ioctl(written.fileno(), CLONE, read.fileno())
        except OSError:
            return False
    return True


def place_files(directory: Path, place: Path, names: Iterable[str] | None = None) -> None:
    """Copy files of a directory; weights, which nobody writes to, by a link if that can be.

    Args:
        directory: Where they are.
        place: Where they come.
        names: Which; all by default.
    """
    there = (file for file in directory.rglob("*") if not file.is_dir())
    for file in sorted(there if names is None else map(directory.joinpath, names)):
        target = place / file.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        (link_file if file.suffix == WEIGHTS else copy_file)(file, target)


def copy_checkpoint(source: Path, out: Path, *, link: bool = False) -> None:
    """Copy weights, configuration and tokenizer of ``source`` into the directory ``out``.

    Pickled weights, weights in another form that lie beside these (``consolidated.safetensors``),
    training states and other files stay behind.

    Args:
        source: A checkpoint.
        out: A directory, made where it is not there.
        link: Whether weights are on the disk once where that can be, as one file under two names:
            who writes to ``source`` then writes to both.

    Raises:
        InputError: ``source`` has no weights, or an index that is none.
    """
    from upcycle_core.checkpoints.reader import INDEX_FILE, weight_files  # torch

    weights, index, faults = weight_files(source, str(source))
    raise_faults(faults)
    out.mkdir(parents=True, exist_ok=True)
    named = {*weights, *([] if index is None else [INDEX_FILE])}
    others = {file for pattern in PATTERNS for file in source.glob(pattern) if file.is_file()}
    for file in sorted(others | {source / name for name in named}):
        target = out / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        place = link_file if link and file.suffix == WEIGHTS else copy_file
        place(file, target)
