"""Pieces that wait for a machine: one that is away may come back, and Ray would wait for ever."""

import time
from collections.abc import Callable, Mapping, Sequence

from infra.cluster.capacity import room_faults
from infra.recipe.resources import Resources
from upcycle_core.errors import raise_faults

ROOM_SECONDS = 300.0
"""How long pieces wait for a machine that is gone and may come back."""


class Waiting:
    """Whether a machine has room for pieces, and since when none has.

    Args:
        resources: What each reserves, or each of its workers.
        workers: How many work together on one.
        label: What ``log`` calls the pieces.
        log: Told when they begin to wait.
    """

    def __init__(
        self, resources: Resources, workers: int, label: str, log: Callable[[str], None]
    ) -> None:
        self._asked, self._label, self._log = (resources, workers), label, log
        self._there, self._is_told = time.monotonic(), False

    def look(self, machines: Sequence[Mapping[str, float]]) -> None:
        """Look at the machines that are there.

        Args:
            machines: As of ``room_faults``.

        Raises:
            InputError: None has had room for ``ROOM_SECONDS``.
        """
        lacking = list(room_faults(*self._asked, machines))
        if not lacking:
            self._there, self._is_told = time.monotonic(), False
        elif time.monotonic() - self._there > ROOM_SECONDS:
            raise_faults(lacking)
        elif not self._is_told:
            self._is_told = True
            wait = f"waits up to {ROOM_SECONDS:.0f} s for a machine"
            self._log(f"{self._label} {wait}: {lacking[0]}")
