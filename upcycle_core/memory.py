"""How much memory there is, of the machine or of the container that this process is confined to."""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
VERSIONS = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
"""{limit: what is used, and which part of that the kernel takes back first}, of control groups of
both versions."""


def total_memory() -> int:
    """Bytes that this process and its neighbours may hold together."""
    limits = (limit for folder in _groups() for limit, _ in _limits(folder))
    return min([psutil.virtual_memory().total, *limits])


def free_memory() -> int:
    """Bytes that may still be taken: of the machine, and below each limit of a control group.

    Files that the kernel keeps and nobody has read of late count as free, as they do on a machine.
    """
    free = (limit - used for folder in _groups() for limit, used in _limits(folder))
    return max(0, min([psutil.virtual_memory().available, *free]))


def _groups() -> Iterator[Path]:
    """Folders of this process's control groups and of those around them."""
    yield GROUPS
    yield GROUPS / "memory"
    for line in OWN.read_text().splitlines() if OWN.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        place = (GROUPS / kinds if kinds else GROUPS) / path.lstrip("/")
        while place not in (GROUPS, GROUPS / "memory"):
            yield place
            place = place.parent


def _limits(folder: Path) -> Iterator[tuple[int, int]]:
    """The limit of a folder, where it has one, and what is used of it, in bytes."""
    for name, (used, spare) in VERSIONS.items():
        limit = _number(folder / name)
        if limit is not None:
            taken = _number(folder / used) or 0
            yield limit, taken - _statistics(folder).get(spare, 0)


def _number(file: Path) -> int | None:
    """What a file says; None where there is none, or no limit."""
    try:
        said = file.read_text().strip()
    except OSError:
        return None
    return int(said) if said.isdigit() else None


def _statistics(folder: Path) -> dict[str, int]:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {name: int(value) for name, value in pairs}
