"""The machine that a plan is for: this one, or one that the user describes."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from infra.cluster.memory import machine_memory
from infra.recipe.amounts import amount_of
from infra.versioning.versions import remote_of
from upcycle_core.errors import Fault, InputError
from upcycle_core.memory import cores

COUNTS = ("cpus", "gpus")
LARGEST = 2**60
"""Of anything, in bytes or pieces."""
SMALLEST = 10**6
"""Bytes; who says less has left the unit out."""


@dataclass(frozen=True)
class Machine:
    """What there is to plan with.

    Args:
        memory: Bytes.
        cpus: Cores.
        disk: Bytes free.
        gpus: How many.
        gpu_memory: Bytes of each.
        remote_disk: Bytes free where DVC's remote is a directory on another disk; None elsewhere.
    """

    memory: int
    cpus: int
    disk: int
    gpus: int = 0
    gpu_memory: int = 0
    remote_disk: int | None = None

    @classmethod
    def here(cls, home: Path, cpus: int | None, remote: Path | None = None) -> "Machine":
        """This one.

        Args:
            home: Where workspaces are, or will be.
            cpus: As many as Ray is given; all by default.
            remote: DVC's remote, where that is, or will be, a directory.
        """
        import torch

        is_apart = remote is not None and device_of(remote) != device_of(home)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(
            memory=machine_memory(device="cpu") or 0,
            cpus=cpus or cores(),
            disk=shutil.disk_usage(nearest(home)).free,
            gpus=gpus,
            gpu_memory=(machine_memory(device="cuda") or 0) if gpus else 0,
            remote_disk=shutil.disk_usage(nearest(remote)).free if remote and is_apart else None,
        )

    def changed(self, changes: list[str]) -> "Machine":
        """The machine with ``memory=24GB``, ``cpus=2``, ... in place of what it has.

        Raises:
            InputError: No such part, no such amount, no whole number of CPUs or GPUs, or GPUs
                without their memory.
        """
        machine, faults = self, []
        for change in changes:
            name, _, value = change.partition("=")
            if remedy := _remedy(name, value):
                faults.append(Fault("--machine", change, remedy))
                continue
            machine = replace(machine, **{name: int(amount_of(value) or 0)})
        if machine.gpus and not machine.gpu_memory and not faults:
            remedy = "say how much memory each has, as gpu_memory=80GB"
            faults.append(Fault("--machine", f"gpus={machine.gpus}", remedy))
        if faults:
            raise InputError(*faults)
        return machine


def _remedy(name: str, value: str) -> str | None:
    """What to say in place of an amount that a part of a machine cannot have; None where it can."""
    parts, amount = Machine.__dataclass_fields__, amount_of(value)
    if name in COUNTS and not value.strip().isdecimal():
        return f"{name} is a whole number without a unit, as {name}=2"
    if name not in parts or amount is None:
        said = "say PART=AMOUNT, as memory=24GB or cpus=2"
        return f"{said}; parts are {', '.join(parts)}"
    if amount > LARGEST:
        return f"is more than any machine has ({LARGEST:.0e}); give {name} as it is"
    if name == "cpus" and not amount:
        return "a machine has at least one CPU, as cpus=2"
    if name not in COUNTS and 0 < amount < SMALLEST:
        return f"is {amount:g} bytes; give a unit, as 24GB"
    return None


def nearest(path: Path) -> Path:
    """What is there of a path that is not there yet: itself, or the folder to begin it in.

    What the system cannot reach, for its server is away, is not there.
    """
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def device_of(path: Path) -> int:
    """The file system that holds a path, or will."""
    return nearest(path).stat().st_dev


def remote_directory(remote: str | None, home: Path) -> Path | None:
    """The directory that DVC's remote is; None where it is something else, or there is none."""
    return None if remote is None or "://" in remote else Path(remote_of(remote, home))
