"""Content hashes of files and directories."""

import hashlib
from collections.abc import Collection
from pathlib import Path

from upcycle_core.checkpoints.known import KnownFiles


def sha256_file(path: Path) -> str:
    """Return the hexadecimal sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_digest(
    directory: Path,
    exclude: Collection[str] = (),
    *,
    known: KnownFiles | None = None,
    own: bool = False,
) -> dict[str, str]:
    """Hash every file below ``directory``.

    Args:
        directory: The root.
        exclude: Relative paths (with ``/``) that are left out.
        known: Remembers hashes of files that have not changed; by default all are read.
        own: As for ``KnownFiles.sha256``.

    Returns:
        Relative path (with ``/``) to sha256, sorted by path.
    """
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    memory = known or KnownFiles(None)
    return {
        name: memory.sha256(path, own=own)
        for name, path in sorted(files.items())
        if path.is_file() and name not in exclude
    }
