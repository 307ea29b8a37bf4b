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
    hidden: Collection[str] | None = None,
) -> dict[str, str]:
    """Hash every file below ``directory``.

    Args:
        directory: The root.
        exclude: Relative paths (with ``/``) that are left out.
        known: Remembers hashes of files that have not changed; by default all are read.
        own: As for ``KnownFiles.sha256``.
        hidden: Relative paths of hidden files that are hashed, those in hidden folders too; all by
            default. Editors, desktops and network file systems leave others where people look.

    Returns:
        Relative path (with ``/``) to sha256, sorted by path.
    """
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    memory = known or KnownFiles(None)
    return {
        name: memory.sha256(path, own=own)
        for name, path in sorted(files.items())
        if name not in exclude and _counts(name, hidden) and path.is_file()
    }


def _counts(name: str, hidden: Collection[str] | None) -> bool:
    """Whether a file is hashed. macOS hides the twin of each (``._model.safetensors``) under a name
    that a search for such files finds."""
    parts = name.split("/")
    is_hidden = any(part.startswith(".") and not part.startswith("._") for part in parts)
    return hidden is None or name in hidden or not is_hidden
