"""Whether the machines of a Ray have room for a piece: Ray itself would wait for ever."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from infra.recipe.resources import ComputeConfig, Resources
from upcycle_core.errors import Fault

EPSILON = 1e-9
"""Shares of a GPU are decimal fractions."""


def machine(cpus: int | None) -> dict[str, float]:
    """What a Ray on this machine has, beside GPUs, which are seen when it runs."""
    return {"CPU": float(cpus or os.cpu_count() or 1)}


def compute_faults(
    compute: ComputeConfig, machines: Sequence[Mapping[str, float]], *, gpus: bool = True
) -> Iterator[Fault]:
    """What a recipe asks for, kind by kind, and no machine can give: seen before work begins.

    Args:
        compute: The recipe's. Kinds that ask for nothing of their own are looked at when they run.
        machines: As of ``room_faults``.
        gpus: Whether GPUs are looked at.
    """
    for field in fields(compute):
        asked = getattr(compute, field.name)
        if not isinstance(asked, Resources) or asked == type(asked)():
            continue
        asked = asked if gpus else replace(asked, gpus=0.0)
        for fault in room_faults(asked, getattr(asked, "workers", 1), machines):
            _, _, what = fault.field.partition(" ")
            yield replace(fault, field=".".join(filter(None, ("compute", field.name, what))))


def room_faults(
    resources: Resources, workers: int, machines: Sequence[Mapping[str, float]]
) -> Iterator[Fault]:
    """What no machine can give.

    Args:
        resources: What is reserved for a piece, or for each of its workers.
        workers: How many workers a piece has; each computes on one machine.
        machines: What each machine has in all, by Ray's names (``CPU``, ``GPU``).
    """
    wanted = {"CPU": float(resources.cpus), "GPU": resources.gpus}
    lacking = [_lack(kind, each, workers, machines) for kind, each in wanted.items() if each]
    yield from (fault for fault in lacking if fault is not None)
    if not any(lacking) and sum(_places(wanted, machine) for machine in machines) < workers:
        asked = f"{resources.cpus} CPUs and {resources.gpus:g} GPUs"
        remedy = (
            f"the machines of this Ray cannot give {workers} x {asked}, each on one machine; they "
            f"have {_listed(machines)}; ask for less, or start Ray with more"
        )
        yield Fault("compute", asked, remedy)
    if workers > 1 and 0 < resources.gpus < 1:
        remedy = "workers that compute together need whole GPUs (NCCL); ask for 1, or for 1 worker"
        yield Fault("compute gpus", resources.gpus, remedy)


def _lack(
    kind: str, each: float, workers: int, machines: Sequence[Mapping[str, float]]
) -> Fault | None:
    """Too little of one kind: in all, or on the largest machine."""
    name, rooms = f"compute {kind.lower()}s", [machine.get(kind, 0.0) for machine in machines]
    total, largest = sum(rooms), max(rooms, default=0.0)
    share = f" ({each:g} for each of {workers} workers)" if workers > 1 else ""
    if each * workers > total + EPSILON:
        remedy = f"Ray has {total:g} in all; ask for less, or start Ray with more"
        return Fault(name, _plain(each * workers), remedy + share)
    if each > largest + EPSILON:
        remedy = (
            f"Ray has {total:g} in all, but no machine more than {largest:g}, and a piece computes "
            "on one; ask for less, or start Ray on a larger machine"
        )
        return Fault(name, _plain(each), remedy + share)
    return None


def _places(wanted: Mapping[str, float], machine: Mapping[str, float]) -> int:
    """How many workers one machine has room for at once."""
    needed = {kind: each for kind, each in wanted.items() if each}
    return min(int(machine.get(kind, 0.0) / each + EPSILON) for kind, each in needed.items())


def _listed(machines: Sequence[Mapping[str, float]]) -> str:
    parts = [f"{m.get('CPU', 0.0):g} CPUs and {m.get('GPU', 0.0):g} GPUs" for m in machines]
    return "; ".join(f"{parts.count(part)} x {part}" for part in dict.fromkeys(parts)) or "nothing"


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number
