"""Which engine answers: that of the version an alias points at, as soon as it can."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import httpx

from infra.recipe.names import masked
from infra.serving.engine import AbandonedError, Engine, EngineError, Launch, has_room
from infra.serving.pulse import Pulse
from infra.serving.trouble import Troubles

LOG = logging.getLogger("upcycle.serving")
Swap = Literal["auto", "beside", "instead"]
WATCH_SECONDS = 1.0
LOOK_SECONDS, DOUBT_SECONDS = 10.0, 1.0
"""Between two looks at the engine in front: where nothing is wrong, and where somebody doubts."""
STEADY_SECONDS = 60.0
"""An engine that lived so long did not die of how it was started."""
SHORTEST_DELAY_SECONDS = 0.05
CLEAR_SECONDS = 60.0
"""After files could not be removed."""


class UnavailableError(RuntimeError):
    """No engine answers, and none did within the time that a request waits."""


@dataclass(frozen=True)
class Patience:
    """Seconds that things may take.

    Args:
        hold: A request waits for an engine.
        drain: An engine finishes what it has when another one answers.
        start: An engine comes up.
    """

    hold: float = 600.0
    drain: float = 300.0
    start: float = 600.0


class Follower:
    """Keeps one engine in front, that of the version which is wanted.

    Args:
        wanted: The version that the alias points at, and when that was made, which tells it from
            another of its number; None if it points at none. Called in a thread.
        launch: How that version's engine is started; may fetch files. Called in a thread.
        patience: How long things may take.
        swap: Whether two engines run side by side while they change places; ``auto`` where the
            weights of both fit into memory.
        keep: Told which versions engines may still read, when that has changed. Called in a thread,
            while nothing is launched.
        clear: Removes copies of versions that nobody reads, after ``keep``; engines change places
            meanwhile. Called in a thread.
    """

    def __init__(
        self,
        wanted: Callable[[], tuple[int, int] | None],
        launch: Callable[[int], Launch],
        *,
        patience: Patience,
        swap: Swap = "auto",
        keep: Callable[[Collection[int]], None] = lambda numbers: None,
        clear: Callable[[], None] = lambda: None,
    ) -> None:
        self._point, self._launch, self._keep, self._clear = wanted, launch, keep, clear
        self.patience, self._swap = patience, swap
        # A proxy of the user's knows nothing of loopback. An idle connection is left before the
        # engine closes it (5 s): a request on one that is just being closed would be lost.
        self.client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(None, connect=10),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )
        self.current: Engine | None = None
        self.wanted: int | None = None
        self.state = "starting"
        self.last_failure: dict[str, Any] | None = None
        self.left: list[dict[str, Any]] = []
        self.served, self.cut = 0, 0
        self.on_break: Callable[[], None] = lambda: None
        self._made: dict[int, int] = {}
        self._good: int | None = None
        self._before: int | None = None
        self._kept: set[int] = set()
        self._made_way_for: int | None = None
        self._troubles = Troubles()
        self._said: dict[int | str, str] = {}
        self._changed, self._there = asyncio.Event(), asyncio.Event()
        self._doubted, self._left_behind = asyncio.Event(), asyncio.Event()
        self._engines: set[Engine] = set()
        self._retiring: set[asyncio.Task] = set()
        self._tasks: set[asyncio.Task] = set()

    async def begin(self) -> None:
        """Bring up the first engine, and follow the alias from then on.

        Raises:
            InputError: The alias points at no version, or that one cannot be served.
            EngineError: The engine does not come up.
        """
        pointed = await asyncio.to_thread(self._point)
        if pointed is None:
            raise EngineError("the alias points at no version any more")
        self.wanted, self._made[pointed[0]] = pointed
        await self._bring_up(pointed[0])
        for work in (self._watch(), self._follow(), self._attend(), self._clear_up()):
            self._spawn(work)

    async def end(self) -> None:
        """Stop every engine."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(engine.stop() for engine in list(self._engines)))
        finally:
            for engine in self._engines:
                engine.clean_up()
            await self.client.aclose()

    async def lease(self) -> Engine:
        """The engine that answers now; it counts as busy until ``release``.

        Raises:
            UnavailableError: There is none, and none came within ``patience.hold``.
        """
        try:
            async with asyncio.timeout(self.patience.hold):
                while True:
                    await self._there.wait()
                    engine = self.current
                    if engine is not None and engine.alive:
                        engine.take()
                        return engine
                    self._notice()
        except TimeoutError:
            raise UnavailableError from None

    def doubt(self) -> None:
        """Look soon whether the engine in front is still there."""
        self._doubted.set()

    def status(self) -> dict[str, Any]:
        """What ``GET /upcycle`` shows."""
        engine = self.current
        return {
            "state": self.state,
            "version": engine.launch.number if engine else None,
            "wanted": self.wanted,
            "seconds_to_next_try": self._next_try(),
            "since": engine.since if engine else None,
            "requests": self.served,
            "requests_of_this_version": engine.served if engine else 0,
            "in_flight": sum(one.in_flight for one in self._engines),
            "cut": self.cut,
            "engines": len(self._engines),
            "last_failure": self.last_failure,
            "left": self.left,
        }

    async def _watch(self) -> None:
        """Look where the alias points, for ever."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                pointed = await asyncio.to_thread(self._point)
            except Exception as error:  # whatever the registry has, the server goes on
                self._report("registry", f"the registry cannot be read: {error}")
                continue
            self._said.pop("registry", None)
            if pointed is None:
                self._report("alias", "the alias is gone; its last version goes on")
                continue
            self._said.pop("alias", None)
            number, made = pointed
            if (number, made) != (self.wanted, self._made.get(number)):
                self.wanted, self._made[number], self._made_way_for = number, made, None
                self._troubles.forget(number)  # what is asked for anew may be tried anew
                self._changed.set()

    async def _attend(self) -> None:
        """End an engine in front that has hung, for ever; what has ended is brought up again."""
        pulse = None
        while True:
            await asyncio.sleep(DOUBT_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._doubted.wait()
            self._doubted.clear()
            engine = self.current
            if engine is None or not engine.alive:
                continue
            if pulse is None or pulse.engine is not engine:
                pulse = Pulse(engine)
            illness = await pulse.illness()
            if illness is not None and engine is self.current:
                engine.illness = illness
                await engine.stop()

    async def _follow(self) -> None:
        """Bring up what is wanted, and again what has died, for ever."""
        while True:
            self._changed.clear()
            self._notice()
            target = self._target()
            if target is None or target == self._answering:
                await self._let_go()
                await self._pause()
                continue
            try:
                await self._bring_up(target)
            except AbandonedError:
                continue
            except Exception as error:  # of the registry, the files, the engine: what runs goes on
                self._fail(target, str(error))
                if target == self._good:  # nothing answers, so nothing would be taken away again
                    self._made_way_for = None

    @property
    def _answering(self) -> int | None:
        """The version in front; None too where another has its number by now."""
        engine = self.current
        if engine is None or engine.made != self._made.get(engine.launch.number):
            return None
        return engine.launch.number

    def _target(self) -> int | None:
        """What is wanted, or else what has answered before; None while both must wait."""
        return next((number for number in self._candidates() if self._waiting(number) <= 0), None)

    def _candidates(self) -> list[int]:
        """Versions that may answer, first the one that is wanted."""
        return [number for number in (self.wanted, self._good) if number is not None]

    def _is_in_vain(self, number: int) -> bool:
        """Whether an engine that answered was stopped for this version, which then did not."""
        return number == self.wanted == self._made_way_for != self._good

    def _waiting(self, number: int) -> float:
        return self._troubles.waiting(number, in_vain=self._is_in_vain(number))

    def _next_try(self) -> int | None:
        """Seconds until the version that is wanted is tried again; None of one at work."""
        if self.wanted is None or self._answering == self.wanted:
            return None
        seconds = self._waiting(self.wanted)
        return math.ceil(seconds) if 0 < seconds < math.inf else None

    async def _pause(self) -> None:
        """Wait for news, or until what has failed may be tried again."""
        others = (number for number in self._candidates() if number != self._answering)
        delays = [self._waiting(number) for number in others]
        seconds = max(SHORTEST_DELAY_SECONDS, min(delays)) if delays else None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _let_go(self) -> None:
        """Say which versions stay: those of engines, the wanted one, and the one to go back to."""
        engines = [engine.launch.number for engine in self._engines]
        named = (*engines, self.wanted, self._good, self._before)
        kept = {number for number in named if number is not None}
        if kept != self._kept:
            await asyncio.to_thread(self._keep, kept)
            self._kept = kept
            self._left_behind.set()

    async def _clear_up(self) -> None:
        """Remove what nobody reads any more, for ever; an engine that dies waits for none of it."""
        while True:
            await self._left_behind.wait()
            self._left_behind.clear()
            try:
                await asyncio.to_thread(self._clear)
            except OSError as error:
                self._report("copies", f"what is served no more cannot be removed: {error}")
                await asyncio.sleep(CLEAR_SECONDS)
                self._left_behind.set()

    async def _bring_up(self, number: int) -> None:
        """Start a version's engine and let it answer."""
        begun, asked, made = time.monotonic(), self.wanted, self._made.get(number)
        self.state = "switching" if self.current else "starting"
        engine = None
        try:
            launch = await asyncio.to_thread(self._launch, number)
            if self.current and not await self._fits(launch) and self.current:  # it may have died
                LOG.warning("version %d starts in place of the old one; requests wait", number)
                self._made_way_for = number
                await self._take_away("instead")
            engine = Engine(launch, self.client, made)
            self._engines.add(engine)
            await engine.start(on_end=self._changed.set)
            await engine.wait_until_ready(
                self.patience.start,
                wanted=lambda: (self.wanted, self._made.get(number)) == (asked, made),
            )
        except BaseException as error:
            ending = engine and self._spawn(self._end(engine))
            self.state = "serving" if self.current else "waiting"
            if ending and not self.current and isinstance(error, Exception):
                await asyncio.wait([ending])  # the next one needs its memory
            raise
        if self.current is not None:
            self._take_away("beside")
        if number != self._good:
            self._before = self._good
        self.current, self._good, self.state = engine, number, "serving"
        if self.wanted is not None and self._is_in_vain(self.wanted):
            self._troubles.rest(self.wanted)
        self._said.pop(number, None)
        self._there.set()
        LOG.info("version %d answers, after %.1f s", number, time.monotonic() - begun)

    async def _fits(self, launch: Launch) -> bool:
        """Whether another engine has room beside those that run."""
        if self._swap != "auto":
            return self._swap == "beside"
        if not has_room(launch.weights) and self._retiring:
            await asyncio.wait(self._retiring)  # those make room first
        return has_room(launch.weights)

    def _take_away(self, how: str) -> asyncio.Task:
        """Let the current engine answer no more; returns the task that drains and ends it."""
        engine, self.current = self.current, None
        assert engine is not None
        self._there.clear()
        task = self._spawn(self._retire(engine, how))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def _retire(self, engine: Engine, how: str) -> None:
        drained = await engine.drain(self.patience.drain)
        if not drained:
            LOG.warning("version %d: %d requests cut", engine.launch.number, engine.in_flight)
        await self._end(engine)
        note = {"version": engine.launch.number, "how": how, "drained": drained}
        self.left = [*self.left[-4:], {**note, "requests": engine.served}]

    async def _end(self, engine: Engine) -> None:
        try:
            await engine.stop()
        finally:
            self._engines.discard(engine)
            self._changed.set()  # nobody reads its files any more

    def _notice(self) -> None:
        """See whether the engine in front has died, and take it away if so."""
        engine = self.current
        if engine is None or engine.alive:
            return
        number = engine.launch.number
        if time.monotonic() - engine.born > STEADY_SECONDS:
            self._troubles.forget(number)
        end = f"The end of {engine.launch.log}:\n{engine.tail()}"
        self._fail(number, f"the engine {engine.illness or 'has ended'}. {end}")
        self._take_away("died")
        self.state = "waiting"
        self._changed.set()

    def _fail(self, number: int, message: str) -> None:
        """Count a failure of a version: it is tried again later, and later each time."""
        in_vain = self.current is None and self._is_in_vain(number)
        self._troubles.add(number, in_vain=in_vain)
        self._report(number, message)

    def _report(self, what: int | str, message: str) -> None:
        """Remember a failure for the status, without passwords; log it the first time."""
        when, message = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"), masked(message)
        self.last_failure = {"when": when, "of": what, "message": message}
        first_line = message.split("\n", 1)[0]
        if self._said.get(what) != first_line:
            self._said[what] = first_line
            LOG.error("version %s: %s" if isinstance(what, int) else "%s: %s", what, message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.critical("a bug: the alias is followed no more", exc_info=task.exception())
            self.on_break()
