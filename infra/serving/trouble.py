"""Versions whose engines have failed, and when each may be tried again: later each time."""

import math
import time
from dataclasses import dataclass

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 60.0
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 60.0, 6 * 3600.0
"""For so long an engine that was stopped in vain answers, before it is stopped for that again."""


@dataclass
class _Trouble:
    count: int = 0
    until: float = 0.0
    in_vain: int = 0
    rests_until: float = 0.0


class Troubles:
    """What has failed of late, by version."""

    def __init__(self) -> None:
        self._of: dict[int, _Trouble] = {}

    def add(self, number: int, *, in_vain: bool) -> None:
        """An engine has failed.

        Args:
            number: Its version.
            in_vain: Whether one that answered was stopped for it; that one comes first now.
        """
        trouble = self._of.setdefault(number, _Trouble())
        trouble.count += 1
        delay = _growing(FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, trouble.count)
        trouble.until = time.monotonic() + delay
        if in_vain:
            trouble.in_vain += 1
            trouble.rests_until = math.inf

    def rest(self, number: int) -> None:
        """The engine that was stopped in vain for this version answers again.

        Its rest begins once, however often it dies meanwhile.
        """
        trouble = self._of.get(number)
        if trouble is not None and trouble.rests_until == math.inf:
            delay = _growing(FIRST_REST_SECONDS, LONGEST_REST_SECONDS, trouble.in_vain)
            trouble.rests_until = time.monotonic() + delay

    def forget(self, number: int) -> None:
        """It is tried as if it had never failed."""
        self._of.pop(number, None)

    def waiting(self, number: int, *, in_vain: bool) -> float:
        """Seconds until a version may be tried; 0 or less of one that may be now.

        Args:
            number: The version.
            in_vain: Whether an engine that answers was stopped for it in vain before.
        """
        if (trouble := self._of.get(number)) is None:
            return 0.0
        until = max(trouble.until, trouble.rests_until) if in_vain else trouble.until
        return until - time.monotonic()


def _growing(first: float, longest: float, count: int) -> float:
    return min(longest, first * 2.0 ** min(max(count - 1, 0), 60))
