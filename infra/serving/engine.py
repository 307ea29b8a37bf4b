"""One engine: a process that answers for one version of a model."""

import asyncio
import contextlib
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from infra.services.ports import HOST
from infra.services.processes import put_aside, tail
from infra.serving.keeper import end_session
from infra.settings import REPOSITORY
from upcycle_core.memory import free_memory

POLL_SECONDS = 0.1
STOP_SECONDS = 8.0
LOG_BYTES = 10_000_000
"""What is said of one version's engines goes into one log, until that is so large."""
MEMORY_FACTOR, MEMORY_BYTES = 1.1, 600_000_000
"""What an engine needs beside its weights: a share for buffers, and Python with torch."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class EngineError(RuntimeError):
    """An engine did not come up; the message ends with its log."""


class AbandonedError(RuntimeError):
    """Another version is wanted by now."""


@dataclass(frozen=True)
class Launch:
    """How the engine of one version is started and asked.

    Args:
        number: The version.
        command: Program and arguments.
        environment: All of its environment.
        folder: Where it runs.
        log: Where its output goes.
        port: Where it will answer, on loopback.
        health: What is asked to see that it is there.
        trial: Path and body of a request that it must answer before it gets others.
        model: What it calls the model; None if a request names none.
        tokenizer: The version's ``tokenizer.json``.
        context: Tokens that it has room for; None if that is not known.
        chats: Whether the version says how a chat is written: it has a chat template.
        weights: Size in memory, bytes.
    """

    number: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    port: int
    health: str
    trial: tuple[str, Mapping[str, Any]]
    model: str | None
    tokenizer: Path
    context: int | None
    chats: bool
    weights: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.port}"


@dataclass(eq=False)
class Engine:
    """A process that was started with ``launch``, and what it has to do.

    Args:
        launch: How it was started.
        client: Asks it.
        made: When its version was made, in milliseconds; None of one that nobody follows.
        since: When it came up, as people read it.
        served: Requests that it has answered.
        in_flight: Requests that it is at.
        illness: Why it was ended though its process lived.
    """

    launch: Launch
    client: httpx.AsyncClient
    made: int | None = None
    since: str = ""
    served: int = 0
    in_flight: int = 0
    illness: str | None = None
    born: float = field(default_factory=time.monotonic)
    _process: asyncio.subprocess.Process | None = None
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Task | None = None
    _tokenizer: Tokenizer | None = None

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Of its keeper, which leads its session."""
        assert self._process is not None
        return self._process.pid

    async def start(self, *, on_end: Callable[[], None]) -> None:
        """Start the process, below a keeper.

        Args:
            on_end: Called when it has ended, for whatever reason.
        """
        self.launch.folder.mkdir(parents=True, exist_ok=True)
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        put_aside(self.launch.log, beyond=LOG_BYTES)
        with self.launch.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "infra.serving.keeper", str(self.launch.folder)),
                *self.launch.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                env=dict(self.launch.environment),
                start_new_session=True,
            )
        self._ended = asyncio.create_task(self._process.wait())
        self._ended.add_done_callback(lambda _: self._idle.set())
        self._ended.add_done_callback(lambda _: on_end())

    async def wait_until_ready(self, seconds: float, *, wanted: Callable[[], bool]) -> None:
        """Wait until it has answered a real request.

        Args:
            seconds: At most so long.
            wanted: Whether it still is.

        Raises:
            EngineError: It ended, or it did not answer in time or in the right way.
            AbandonedError: It is wanted no more.
        """
        deadline = time.monotonic() + seconds
        while not await self._answers():
            if not wanted():
                raise AbandonedError
            if not self.alive:
                raise EngineError(self._said("ended while it started"))
            if time.monotonic() > deadline:
                raise EngineError(self._said(f"did not answer within {seconds:.0f} s"))
            await asyncio.sleep(POLL_SECONDS)
        path, body = self.launch.trial
        try:
            reply = await self.client.post(
                self.launch.url + path, json=body, timeout=max(1.0, deadline - time.monotonic())
            )
        except httpx.HTTPError as error:
            raise EngineError(self._said(f"did not answer a request ({error!r})")) from error
        if reply.status_code != 200:
            problem = f"answered a request with {reply.status_code} {reply.text[:200]}"
            raise EngineError(self._said(problem))
        self.since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def take(self) -> None:
        """A request begins."""
        self.in_flight += 1

    def release(self) -> None:
        """A request has ended, one way or the other."""
        self.in_flight -= 1
        self._idle.set()

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, special ones that the tokenizer adds included."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self.launch.tokenizer))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        return len(self._tokenizer.encode(text).ids)

    async def drain(self, seconds: float) -> bool:
        """Wait until it is at nothing, for ``seconds`` at most; returns whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.in_flight and self.alive:
                    self._idle.clear()
                    await self._idle.wait()
        return not self.in_flight

    async def stop(self) -> None:
        """End the process and all that it started."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
        finally:
            end_session(self._process.pid)
        await self._process.wait()

    def clean_up(self) -> None:
        """End what is left of it, at once: its keeper may have been killed."""
        if self._process is not None:
            end_session(self._process.pid)

    async def _answers(self) -> bool:
        try:
            reply = await self.client.get(self.launch.url + self.launch.health, timeout=10)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    def _said(self, problem: str) -> str:
        return f"{problem}. The end of {self.launch.log}:\n{self.tail()}"

    def tail(self) -> str:
        """The last lines of its log."""
        return COLOUR.sub("", tail(self.launch.log))


def has_room(weights: int) -> bool:
    """Whether an engine of so many bytes of weights fits into the memory that is free now."""
    needed = weights * MEMORY_FACTOR + MEMORY_BYTES
    return free_memory() >= needed


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
