"""The one door through which progress leaves the library: no print, no logger, no tqdm."""

from collections.abc import Mapping
from typing import Protocol


class Progress(Protocol):
    """What a long call reports to. Calls are cheap and may come many times a second."""

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        """Begin ``what``: ``total`` units of work lie ahead. Starting again replaces the last."""

    def advance(self, amount: int = 1, **shown: float) -> None:
        """``amount`` more units are done; ``shown`` stands beside (loss, tokens_per_second)."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves that are to be kept, at ``step``."""


class Silent:
    """Progress that nobody watches."""

    def start(self, what: str, total: int, unit: str = "steps") -> None: ...

    def advance(self, amount: int = 1, **shown: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...
