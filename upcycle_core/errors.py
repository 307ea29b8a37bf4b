"""Errors for people: which field, which value, what to do; all faults of a check in one message."""

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""No room on the disk, in the user's share of it, or in the largest file that is allowed."""
LONGEST = 300
"""Characters of a value that an error shows."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with what the user gave.

    Args:
        field: Where it was given, dotted as in the recipe (``experts.law.path``).
        value: What was given there.
        remedy: What is wrong with it and what to do.
    """

    field: str
    value: object
    remedy: str

    def __str__(self) -> str:
        value = repr(self.value)
        value = value if len(value) <= LONGEST else f"{value[: LONGEST - 3]}..."
        return f"{self.field or repr('')} = {value}: {self.remedy}"

    def within(self, field: str) -> "Fault":
        """This fault with the recipe's field, where what found it did not know it."""
        named = self.field if self.field.startswith(field) else f"{field}: {self.field}"
        return Fault(named, self.value, self.remedy)

    def naming(self, names: Mapping[str, str]) -> "Fault":
        """This fault with places by the names that the user gave them.

        Args:
            names: {place as who found the fault knows it: name}
        """

        def named(text: str) -> str:
            return reduce(lambda said, place: said.replace(place, names[place]), names, text)

        value = named(self.value) if isinstance(self.value, str) else self.value
        return Fault(self.field, value, named(self.remedy))


class InputError(ValueError):
    """What the user gave cannot be used. Raised before heavy work, with every fault found."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))

    def __reduce__(self):  # Ray and Prefect move exceptions between processes
        return type(self), self.faults


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise one ``InputError`` that holds all ``faults``; do nothing if there are none."""
    found = tuple(faults)
    if found:
        raise InputError(*found)
