"""Amounts as people write them: ``24GB``, ``1.5 T``."""

import re

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)


def amount_of(text: str) -> float | None:
    """``24GB``, ``1.5 T`` or ``2`` as a number; None if it is none."""
    found = SIZE.fullmatch(text.strip())
    return None if found is None else float(found[1]) * UNITS[found[2].upper()]
