"""Amounts as people and programs write them: ``24GB``, ``1.5 T``, ``23Gi``."""

import re

POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)


def amount_of(text: str) -> float | None:
    """``24GB``, ``1.5 T``, ``2`` or ``23GiB`` (of 1024 to a power) as a number; None if none."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, unit, binary = found.groups(default="")
    return float(number) * (1024 if binary else 1000) ** POWERS[unit.upper()]
