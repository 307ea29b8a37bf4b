"""Which engine stands in front while aliases move, engines die and versions fail, without one."""

import asyncio
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from threading import Event

import psutil
import pytest
from serving import SECONDS

from infra.serving import follower as following
from infra.serving import trouble
from infra.serving.engine import Engine, EngineError, Launch, has_room
from infra.serving.follower import Follower, Patience


class Pretended:
    """Engines that come up at once, but for those of versions that are broken."""

    def __init__(self, monkeypatch):
        self.starts, self.broken = [], set()
        starts, broken = self.starts, self.broken

        class OfNothing(Engine):
            alive = True

            async def start(self, *, on_end):
                starts.append(self.launch.number)

            async def wait_until_ready(self, seconds, *, wanted):
                if self.launch.number in broken:
                    raise EngineError("ended while it started")

            async def stop(self):
                pass

            def tail(self):
                return ""

        monkeypatch.setattr(following, "Engine", OfNothing)
        monkeypatch.setattr(following, "WATCH_SECONDS", 0.01)
        monkeypatch.setattr(following, "LOOK_SECONDS", SECONDS)  # there is no process to look at
        monkeypatch.setattr(trouble, "LONGEST_DELAY_SECONDS", 0.01)

    def launch(self, number):
        files = {"folder": None, "log": None, "tokenizer": None}
        asked = {"health": "", "trial": ("", {}), "model": None, "context": None}
        return Launch(number, (), {}, **files, **asked, port=1, chats=False, weights=1)


@pytest.fixture
def pretended(monkeypatch):
    return Pretended(monkeypatch)


def test_a_server_keeps_what_engines_read_what_is_wanted_and_the_version_before(pretended):
    alias, kept = [1], []
    pretended.broken.add(4)

    async def run():
        how = {"patience": Patience(drain=SECONDS), "swap": "beside", "keep": kept.append}
        follower = Follower(lambda: (alias[0], 0), pretended.launch, **how)

        async def until(numbers):
            async with asyncio.timeout(SECONDS):
                while not kept or kept[-1] != numbers:
                    await asyncio.sleep(0.01)

        await follower.begin()
        try:
            await until({1})
            oldest = await follower.lease()
            for alias[0], numbers in ((2, {1, 2}), (3, {1, 2, 3}), (4, {1, 2, 3, 4})):
                await until(numbers)
            oldest.release()  # the first engine was at a request until now
            await until({2, 3, 4})
            alias[0] = 5
            await until({3, 5})
            alias[0] = 3
            await until({3, 5})
        finally:
            await follower.end()

    asyncio.run(run())


@asynccontextmanager
async def followed(pretended, alias, **options):
    """A follower whose engine has come up."""
    follower = Follower(lambda: (alias[0], 0), pretended.launch, patience=Patience(), **options)
    await follower.begin()
    try:
        async with asyncio.timeout(SECONDS):
            yield follower
    finally:
        await follower.end()


def die(follower):
    """Let the engine in front end."""
    follower.current.alive = False
    follower._changed.set()


def test_an_engine_that_dies_while_copies_are_removed_is_started_again(pretended):
    begun, removed = Event(), Event()

    def clear():
        begun.set()
        removed.wait(SECONDS)

    async def run():
        try:
            async with followed(pretended, [1], swap="beside", clear=clear) as follower:
                await asyncio.to_thread(begun.wait, SECONDS)
                die(follower)
                async with asyncio.timeout(10):
                    while pretended.starts != [1, 1]:
                        await asyncio.sleep(0.01)
        finally:
            removed.set()

    asyncio.run(run())


def test_what_could_not_be_removed_is_tried_again(pretended, monkeypatch):
    monkeypatch.setattr(following, "CLEAR_SECONDS", 0.01)
    outcomes = [OSError("Stale file handle"), OSError("Stale file handle"), None]

    def clear():
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    async def run():
        async with followed(pretended, [1], swap="beside", clear=clear) as follower:
            async with asyncio.timeout(10):
                while outcomes:
                    await asyncio.sleep(0.01)
            assert follower.status()["last_failure"]["of"] == "copies"

    asyncio.run(run())


def test_without_room_a_version_is_tried_again_though_the_old_engine_dies_more_often(
    pretended, monkeypatch
):
    monkeypatch.setattr(trouble, "FIRST_REST_SECONDS", 0.5)
    pretended.broken.add(2)

    async def run():
        alias = [1]
        async with followed(pretended, alias, swap="instead") as follower:
            alias[0] = 2
            async with asyncio.timeout(10):
                while pretended.starts.count(2) < 2:
                    await asyncio.sleep(0.1)
                    if follower.current is not None and 2 in pretended.starts:
                        die(follower)

    asyncio.run(run())


def test_without_room_the_old_engine_makes_way_for_a_broken_version_at_once_and_much_later(
    pretended,
):
    starts, alias = pretended.starts, [1]
    pretended.broken.add(2)

    async def run():
        launch, patience = pretended.launch, Patience()
        follower = Follower(lambda: (alias[0], 0), launch, patience=patience, swap="instead")
        await follower.begin()
        try:
            for tries in (1, 2):
                alias[0] = 2
                async with asyncio.timeout(SECONDS):
                    while len(starts) < 1 + 2 * tries or follower.current is None:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)  # it would be tried again five times by then
                assert starts == [1, *[2, 1] * tries]
                assert follower.current.launch.number == 1
                assert follower.status()["last_failure"]["of"] == 2
                assert 50 < follower.status()["seconds_to_next_try"] <= 60
                alias[0] = 1  # what is asked for anew may be tried anew
                async with asyncio.timeout(SECONDS):
                    while follower.wanted != 1:
                        await asyncio.sleep(0.01)
        finally:
            await follower.end()

    asyncio.run(run())


def test_without_room_a_version_that_failed_is_tried_after_growing_pauses(pretended, monkeypatch):
    starts, alias, when = pretended.starts, [1], []
    monkeypatch.setattr(trouble, "FIRST_REST_SECONDS", 0.4)
    pretended.broken.add(2)

    async def run():
        launch, patience = pretended.launch, Patience()
        follower = Follower(lambda: (alias[0], 0), launch, patience=patience, swap="instead")

        async def until(expected):
            async with asyncio.timeout(SECONDS):
                while starts != expected or follower.current is None:
                    await asyncio.sleep(0.01)
            when.append(time.monotonic())

        await follower.begin()
        try:
            alias[0] = 2
            for tries in (1, 2, 3):
                await until([1, *[2, 1] * tries])
            assert follower.status()["seconds_to_next_try"] == 2
            pretended.broken.clear()  # what hindered it is over
            await until([1, *[2, 1] * 3, 2])
            assert follower.current.launch.number == 2
            assert follower.status()["seconds_to_next_try"] is None
        finally:
            await follower.end()
        pauses = [after - before for before, after in pairwise(when)]
        assert all(pause >= least for pause, least in zip(pauses, (0.3, 0.7, 1.5), strict=True))

    asyncio.run(run())


def test_without_room_the_next_engine_waits_until_the_one_that_failed_has_ended(
    pretended, monkeypatch
):
    """It would find the memory taken, and its version be blamed."""
    alive, most, stop = set(), [], following.Engine.stop

    async def slow(self):
        await asyncio.sleep(0.2)
        alive.discard(self)
        await stop(self)

    start = following.Engine.start

    async def counted(self, *, on_end):
        alive.add(self)
        most.append(len(alive))
        await start(self, on_end=on_end)

    monkeypatch.setattr(following.Engine, "stop", slow)
    monkeypatch.setattr(following.Engine, "start", counted)
    pretended.broken.add(2)

    async def run():
        alias = [1]
        async with followed(pretended, alias, swap="instead") as follower:
            alias[0] = 2
            while pretended.starts != [1, 2, 1] or follower.current is None:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert most == [1, 1, 1]


def test_an_address_of_the_registry_is_shown_without_its_password(pretended, caplog):
    fails = []

    def wanted():
        if not fails:
            return 1, 0
        raise OSError("API request to http://us:sesame@registry:5000/api failed")

    async def run():
        follower = Follower(wanted, pretended.launch, patience=Patience(), swap="beside")
        await follower.begin()
        fails.append(1)
        try:
            async with asyncio.timeout(SECONDS):
                while follower.status()["last_failure"] is None:
                    await asyncio.sleep(0.01)
        finally:
            await follower.end()
        return follower.status()["last_failure"]["message"]

    said = asyncio.run(run())
    assert "http://us:***@registry:5000" in said
    assert "sesame" not in caplog.text


def test_a_version_that_was_made_anew_under_its_number_is_served_anew(pretended, monkeypatch):
    """The registered model was deleted, and made again; the first try of it fails."""
    monkeypatch.setattr(trouble, "FIRST_DELAY_SECONDS", 0.01)
    pointed = [(1, 100)]

    async def run():
        follower = Follower(
            lambda: pointed[0], pretended.launch, patience=Patience(), swap="beside"
        )
        await follower.begin()
        try:
            async with asyncio.timeout(SECONDS):
                before = follower.current
                pretended.broken.add(1)
                pointed[0] = (1, 200)
                while len(pretended.starts) < 2:
                    await asyncio.sleep(0.01)
                assert follower.current is before
                pretended.broken.clear()
                while follower.current is before:
                    await asyncio.sleep(0.01)
                while follower.status()["engines"] > 1:
                    await asyncio.sleep(0.01)
        finally:
            await follower.end()

    asyncio.run(run())


def test_room_is_that_of_the_memory():
    assert has_room(0)
    assert not has_room(psutil.virtual_memory().total)
