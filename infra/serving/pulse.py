"""Whether an engine that came up has hung: its process is there, and does nothing for anybody.

Engines say that they are there beside their work: vLLM computes in a process of its own,
transformers and MLflow in a thread of their own. So one that is busy answers late; and even one
that did not answer at all uses the processor, and is never taken for one that hangs. What hangs and
uses the processor all the same, as in a loop, is not found.
"""

import asyncio
import math
import time
from contextlib import suppress

import httpx
import psutil

from infra.services.ports import HOST
from infra.serving.engine import Engine

ANSWER_SECONDS = 30.0
SILENCES = 4
"""So often in a row nothing comes within ``ANSWER_SECONDS``, and nothing is done meanwhile."""
BUSY = 0.01
"""Share of a processor's time that is work."""
REFUSALS = 10
"""So often in a row nobody listens. A system refuses no connection for a busy listener."""


class Pulse:
    """What an engine's answers to the question whether it is there were.

    Args:
        engine: It has come up.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._silences = self._refusals = 0

    async def illness(self) -> str | None:
        """Ask it; returns what it suffers from, once that is beyond doubt."""
        launch, begun = self.engine.launch, time.monotonic()
        before = await asyncio.to_thread(self._processor_seconds)
        silences, refusals = self._silences + 1, self._refusals + 1
        self._silences = self._refusals = 0
        try:
            await self.engine.client.get(launch.url + launch.health, timeout=ANSWER_SECONDS)
        except httpx.ConnectError:
            self._refusals = refusals if await self._is_refused() else 0
        except httpx.HTTPError:
            worked = await asyncio.to_thread(self._processor_seconds) - before
            if abs(worked) < BUSY * (time.monotonic() - begun):  # less: a process of its has ended
                self._silences = silences
        if self._refusals >= REFUSALS:
            return "lived and refused connections"
        if self._silences >= SILENCES:
            return "hung: it lived, did nothing and did not answer"
        return None

    async def _is_refused(self) -> bool:
        """Whether it is the engine that lets nobody in: a front without files cannot ask either."""
        try:
            _, writer = await asyncio.open_connection(HOST, self.engine.launch.port)
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        writer.close()
        return False

    def _processor_seconds(self) -> float:
        """What its keeper, it, and all that they have started have used; NaN if that is unknown."""
        total = 0.0
        try:
            keeper = psutil.Process(self.engine.pid)
            for process in (keeper, *keeper.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        except psutil.Error:
            return math.nan
        return total
