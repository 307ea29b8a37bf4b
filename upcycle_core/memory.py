"""Memory and cores that there are, of the machine or of the container around this process."""

import os
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


def cores() -> int:
    """Cores that this process and its neighbours may use together; a share of one is one."""
    quotas = (quota for folder in _groups("cpu") for quota in _quotas(folder))
    there = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        there = len(os.sched_getaffinity(0))
    return max(1, int(min([there, *quotas])))


def _groups(kind: str = "memory") -> Iterator[Path]:
    """Folders of this process's control groups of a kind and of those around them."""
    yield GROUPS
    yield GROUPS / kind
    for line in OWN.read_text().splitlines() if OWN.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        root = GROUPS / kinds if kinds else GROUPS
        place = root / path.lstrip("/")
        while place not in (root, GROUPS):
            yield place
            place = place.parent


def _quotas(folder: Path) -> Iterator[float]:
    """The limit of a folder, where it has one, in cores; by control groups of both versions."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        parts = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota, period = (str(part or "max") for part in parts)
    if quota.isdigit() and period.isdigit():
        yield int(quota) / int(period)


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
