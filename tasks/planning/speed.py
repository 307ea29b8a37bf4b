"""What a second brings on this machine, kept in the home folder; or as a user says of another."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from infra.durable import is_whole, read_json, sealed, write_atomically
from infra.recipe.amounts import amount_of
from tasks.planning.machine import LARGEST
from upcycle_core.errors import Fault, InputError
from upcycle_core.planning.rates import Rates, identity, measure

FILE = "rates.json"
NAMES = tuple(field.name for field in fields(Rates))
WHOLE = ("fp32", "bf16")
"""Rates of all cores; of one core a share is taken where nothing is said of it."""

MOVED = ("memory", "read", "write")
SHOWN = 40
"""Characters of a word."""
SLOWEST = 10**6
"""A second; who says less has left the unit out."""


def known_rates(home: Path) -> Rates | None:
    """What was measured of this machine; None if nothing was, or it is another one now.

    Args:
        home: Where it is kept.
    """
    kept = read_json(home / FILE)
    if not is_whole(kept) or kept.get("machine") != identity():
        return None
    return Rates.of(kept.get("rates", {}))


def measured_rates(home: Path, *, again: bool = False) -> Rates:
    """The same, measured where it is not known: in a few seconds.

    Args:
        home: Where it is kept, and whose disk is measured.
        again: Measure whatever is known.
    """
    known = None if again else known_rates(home)
    if known is not None:
        return known
    home.mkdir(parents=True, exist_ok=True)
    found = measure(home)
    values = sealed({"machine": identity(), "rates": found.to_dict()})
    write_atomically(home / FILE, json.dumps(values, indent=1) + "\n")
    return found


def given_rates(said: Sequence[str], cores: int) -> Rates:
    """What a user says of another machine: ``fp32=900G bf16=2T read=2GB write=1GB``.

    Args:
        said: A rate each; those that are left out are not known.
        cores: Of that machine.

    Raises:
        InputError: No such rate, or no such amount.
    """
    values, faults = dict.fromkeys(NAMES, 0.0), []
    for word in said:
        name, _, value = word.partition("=")
        amount = amount_of(value)
        if name not in values or not amount:
            remedy = "say RATE=AMOUNT a second, as bf16=2T or read=2GB; rates are "
            faults.append(Fault("--rates", word, remedy + ", ".join(NAMES)))
            continue
        if amount > LARGEST:
            remedy = "is more than any machine does; give it as it is"
            faults.append(Fault("--rates", word[:SHOWN], remedy))
        elif amount < SLOWEST:
            unit = "2GB" if name in MOVED else "900G"
            remedy = f"is {amount:g} a second; give a unit, as {name}={unit}"
            faults.append(Fault("--rates", word, remedy))
        values[name] = amount
    if faults:
        raise InputError(*faults)
    for name in WHOLE:
        values[f"{name}_one"] = values[f"{name}_one"] or values[name] / max(1, cores)
    return Rates(**values)
