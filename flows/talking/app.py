"""The page, the facts about the model, and answers as they come, over HTTP on loopback.

``GET /`` is the page, ``GET /about`` the model, ``POST /answers`` an answer: a line of JSON for
every event, ``waiting``, ``token``, ``ended`` or ``fault``. Who goes away stops the answer.
"""

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.talking.speaker import Event, Question, Speaker
from infra.services.ports import HOST
from upcycle_core.errors import InputError

PAGE = Path(__file__).with_name("page.html")
LONGEST = 4 << 20
"""Bytes of a question: more than any model's context."""
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def make_app(speaker: Speaker, port: int) -> ASGIApp:
    """Everything that is served at ``port``."""
    page, turns = PAGE.read_text(encoding="utf-8"), _Turns(speaker)

    async def show(_request: Request) -> Response:
        return Response(page, media_type="text/html")

    async def about(_request: Request) -> Response:
        return JSONResponse(speaker.about())

    async def answers(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return _refusal(415, "content-type: must be application/json")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST:
                return _refusal(413, f"question: is longer than {LONGEST} bytes; shorten it")
        try:
            question = Question.read(json.loads(body))
        except InputError as error:
            return _refusal(422, str(error))
        except (ValueError, RecursionError):
            return _refusal(400, "question: is no JSON")
        return _Told(turns.answered(question), media_type="application/x-ndjson")

    routes = [
        Route("/", show),
        Route("/about", about),
        Route("/answers", answers, methods=["POST"]),
    ]
    return _Guard(Starlette(routes=routes), port, _policy(page))


class _Turns:
    """Answers one question at a time; the others wait, and are told so."""

    def __init__(self, speaker: Speaker) -> None:
        self.speaker, self.lock, self.asking = speaker, asyncio.Lock(), 0
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="speaker")

    async def answered(self, question: Question) -> AsyncGenerator[str, None]:
        """A line of JSON for each event."""
        ahead, self.asking = self.asking, self.asking + 1
        try:
            if ahead:
                yield _line({"is": "waiting", "ahead": ahead})
            async with self.lock, aclosing(self._computed(question)) as events:
                async for event in events:
                    yield _line(event)
        finally:
            self.asking -= 1

    async def _computed(self, question: Question) -> AsyncGenerator[Event, None]:
        """Compute in the worker; whoever stops listening stops it, and waits until it has."""
        loop, stopped = asyncio.get_running_loop(), threading.Event()
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def take(event: Event | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def work() -> None:
            try:
                self.speaker.answer(question, take, stopped.is_set)
            except InputError as error:
                take({"is": "fault", "text": str(error)})
            except Exception as error:
                take({"is": "fault", "text": f"{type(error).__name__}: {error}"})
                raise
            finally:
                take(None)

        done = loop.run_in_executor(self.worker, work)
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            stopped.set()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([done])
        done.result()


class _Told(StreamingResponse):
    """A stream that ends when its reader goes away, whether or not there is something to send."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        async with aclosing(self.body_iterator), anyio.create_task_group() as group:  # type: ignore[type-var]  # a generator
            group.start_soon(leave)
            await self.stream_response(send)
            group.cancel_scope.cancel()


class _Guard:
    """Lets in who came to this address, from this page or from no page at all.

    A page of somewhere else whose name leads here (DNS rebinding) names another host.

    Args:
        app: What is guarded.
        port: Of this server.
        policy: Content-Security-Policy of the page.
    """

    def __init__(self, app: ASGIApp, port: int, policy: str) -> None:
        self.app = app
        # Browsers leave out the port that is HTTP's.
        endings = (f":{port}", "") if port == 80 else (f":{port}",)
        self.hosts = {f"{name}{ending}" for name in (HOST, "localhost") for ending in endings}
        self.headers = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing else is spoken here

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self.headers]}
            await send(message)

        headers = Request(scope).headers
        origin = headers.get("origin")
        origins = {f"http://{host}" for host in self.hosts}
        if headers.get("host") not in self.hosts or (origin is not None and origin not in origins):
            refusal = _refusal(403, f"host: this is {' or '.join(sorted(origins))} alone")
            await refusal(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


def _policy(page: str) -> str:
    """Nothing runs or is fetched but what stands in ``page`` and comes from here."""
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(allowed["script"]),
        "style-src": " ".join(allowed["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _line(event: Event) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")) + "\n"


def _refusal(status: int, text: str) -> Response:
    return JSONResponse({"is": "fault", "text": text}, status_code=status)
