"""Whether the machines of a Ray have room for a piece: Ray itself would wait for ever."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields

from infra.recipe.resources import ComputeConfig, Resources
from upcycle_core.errors import Fault
from upcycle_core.memory import cores, total_memory

EPSILON = 1e-9
"""Shares of a GPU are decimal fractions."""
ACCELERATOR = "accelerator_type:"
"""Ray's prefix of a kind of GPU: a machine that has it has one, and a piece takes next to nothing
of it."""
KEYS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}
"""What a recipe calls Ray's own resources."""
BROUGHT = ("node:", ACCELERATOR)
"""How names begin of what every machine has by itself."""
FOUND = ("FURIOSA", "HPU", "MBLT", "NPU", "RBLN", "TPU", "TTNPU", "neuron_cores")
"""What Ray looks for on a machine beside GPUs, and names so."""


def machine(cpus: int | None) -> dict[str, float]:
    """What is known of a Ray on this machine before it runs."""
    return {"CPU": float(cpus or cores()), "memory": float(total_memory())}


def requested(resources: Resources) -> dict[str, float]:
    """What is reserved for a piece, or for each of its workers, by Ray's names."""
    wanted = {
        "CPU": float(resources.cpus),
        "GPU": resources.gpus,
        "memory": float(resources.memory or 0),
        **resources.resources,
    }
    if resources.accelerator is not None:
        wanted[f"{ACCELERATOR}{resources.accelerator}"] = 0.001
    return {name: amount for name, amount in wanted.items() if amount}


def compute_faults(
    compute: ComputeConfig,
    machines: Sequence[Mapping[str, float]],
    *,
    known: Collection[str] | None = None,
) -> Iterator[Fault]:
    """What a recipe asks for, kind by kind, and no machine can give: seen before work begins.

    Args:
        compute: The recipe's. Kinds that ask for nothing of their own are looked at when they run.
        machines: As of ``room_faults``.
        known: What of the machines is known, by Ray's names (``CPU``, ``GPU``, ``memory``), and
            nothing else is looked at; all by default.
    """
    for kind, asked in _kinds(compute):
        workers = getattr(asked, "workers", 1)
        if known is not None:
            asked = Resources(
                cpus=asked.cpus,
                gpus=asked.gpus if "GPU" in known else 0,
                memory=asked.memory if "memory" in known else None,
            )
        for fault in room_faults(asked, workers, machines):
            _, _, what = fault.field.partition(" ")
            where = ".".join(filter(None, ("compute", kind, what)))
            yield Fault(where, fault.value, fault.remedy)


def named_faults(compute: ComputeConfig) -> Iterator[Fault]:
    """Resources that are the user's own, where a flow starts its Ray itself: that one has none."""
    for kind, asked in _kinds(compute):
        for name, amount in asked.resources.items():
            if name not in FOUND and not name.startswith(BROUGHT):
                given = json.dumps({name: _plain(amount)})
                remedy = "the Ray that a flow starts for itself has no such resource; remove it, "
                remedy += f"or start one that has it (ray start --head --resources='{given}') and "
                remedy += "name that in RAY_ADDRESS"
                yield Fault(f"compute.{kind}.resources.{name}", _plain(amount), remedy)


def _kinds(compute: ComputeConfig) -> Iterator[tuple[str, Resources]]:
    """Kinds of work that ask for something of their own."""
    for field in fields(compute):
        asked = getattr(compute, field.name)
        if isinstance(asked, Resources) and asked != type(asked)():
            yield field.name, asked


def room_faults(
    resources: Resources, workers: int, machines: Sequence[Mapping[str, float]]
) -> Iterator[Fault]:
    """What no machine can give.

    Args:
        resources: What is reserved for a piece, or for each of its workers.
        workers: How many workers a piece has; each computes on one machine.
        machines: What each machine has in all, by Ray's names (``CPU``, ``GPU``, ``memory``).
    """
    wanted = requested(resources)
    lacking = [_lack(name, each, workers, machines) for name, each in wanted.items()]
    yield from (fault for fault in lacking if fault is not None)
    if not any(lacking) and sum(_places(wanted, machine) for machine in machines) < workers:
        asked = _listed(wanted, wanted)
        remedy = (
            f"the machines of this Ray cannot give {workers} x {asked}, each on one machine; they "
            f"have {_counted(machines, wanted)}; ask for less, or start Ray with more"
        )
        yield Fault("compute", asked, remedy)
    if workers > 1 and resources.gpus not in (0, 1):
        remedy = "each of the workers that compute together has one GPU (NCCL); ask for 1, or for "
        remedy += "1 worker"
        yield Fault("compute gpus", resources.gpus, remedy)


def _lack(
    name: str, each: float, workers: int, machines: Sequence[Mapping[str, float]]
) -> Fault | None:
    """Too little of one resource: none, too little in all, or on the largest machine."""
    rooms = [machine.get(name, 0.0) for machine in machines]
    total, largest = sum(rooms), max(rooms, default=0.0)
    if name not in KEYS and not total:
        return _unknown(name, each * workers, machines)
    if name.startswith(ACCELERATOR):
        return None
    where = f"compute {KEYS.get(name, f'resources.{name}')}"
    share = f" ({_number(name, each)} for each of {workers} workers)" if workers > 1 else ""
    there = f"Ray has {_number(name, total)} in all"
    if each * workers > total + EPSILON:
        return Fault(
            where, _plain(each * workers), f"{there}; ask for less, or start Ray with more{share}"
        )
    if each > largest + EPSILON:
        remedy = (
            f"{there}, but no machine more than {_number(name, largest)}, and a piece computes "
            f"on one; ask for less, or start Ray on a larger machine{share}"
        )
        return Fault(where, _plain(each), remedy)
    return None


def _unknown(name: str, amount: float, machines: Sequence[Mapping[str, float]]) -> Fault:
    """A kind of GPU, or a resource of the user's, that no machine has; and which there are."""
    prefix, _, accelerator = name.rpartition(":")
    is_accelerator = f"{prefix}:" == ACCELERATOR
    names = sorted({name for machine in machines for name in machine})
    if is_accelerator:
        there = [n.removeprefix(ACCELERATOR) for n in names if n.startswith(ACCELERATOR)]
    else:
        known = {*KEYS, "object_store_memory"}
        there = [n for n in names if n not in known and not n.startswith(BROUGHT)]
    remedy = f"no machine of this Ray has it (they have {there or 'none'}); "
    if is_accelerator:
        remedy += "name one that there is, or remove it" if there else "remove it"
        return Fault("compute accelerator", accelerator, remedy)
    remedy += "remove it, or start Ray with it (ray start --resources)"
    return Fault(f"compute resources.{name}", _plain(amount), remedy)


def _places(wanted: Mapping[str, float], machine: Mapping[str, float]) -> int:
    """How many workers one machine has room for at once."""
    return min(int(machine.get(name, 0.0) / each + EPSILON) for name, each in wanted.items())


def _counted(machines: Sequence[Mapping[str, float]], wanted: Mapping[str, float]) -> str:
    """Machines, alike ones together, by what is wanted of them."""
    parts = [_listed(machine, wanted) for machine in machines]
    return "; ".join(f"{parts.count(part)} x {part}" for part in dict.fromkeys(parts)) or "nothing"


def _listed(amounts: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    """Amounts, CPUs and GPUs always, in words."""
    words = [f"{amounts.get('CPU', 0.0):g} CPUs", f"{amounts.get('GPU', 0.0):g} GPUs"]
    for name in (name for name in wanted if name not in ("CPU", "GPU") and amounts.get(name)):
        if name.startswith(ACCELERATOR):
            words.append(name.removeprefix(ACCELERATOR))
        else:
            words.append(f"{_number(name, amounts[name])} {'bytes' if name == 'memory' else name}")
    return " and ".join(words)


def _number(name: str, amount: float) -> str:
    """As a recipe writes it: bytes have too many digits to go without a mark."""
    return f"{int(amount):_}" if name == "memory" else f"{amount:g}"


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number
