"""What clients talk to: it hands requests to the current engine, and its answers back."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from infra.serving.engine import Engine
from infra.serving.follower import Follower, UnavailableError

LOG = logging.getLogger("upcycle.serving")
LOOPBACK = ("127.0.0.1", "localhost")
VERSION_HEADER = "x-upcycle-version"
LONGEST_BODY = 32 * 1024 * 1024
TRIES = 2
"""A request that an engine has died of is given to the next one once, not for ever."""
PAUSE_SECONDS = 0.2
RETRY_AFTER_SECONDS = "10"
GONE = Response(status_code=499)
"""Nobody reads it."""
CHATS = ("/v1/chat/completions", "/v1/responses")
"""Paths whose messages a chat template makes a text of."""
CHAT_PARTS = ("messages", "instructions", "input")
"""What makes a chat: messages; in ``/v1/responses`` instructions and what is said to them."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""How many new tokens a request asks for at most, by path."""
GENERATION = "generation_config"
"""JSON text beside OpenAI's fields, which transformers generates by."""
MOST_AT_ONCE = {"num_beams": 16, "num_return_sequences": 16}
"""Of ``generation_config``: each multiplies the work and the memory of a request."""
PASSED = (b"content-type", b"x-request-id", b"retry-after")


@dataclass(frozen=True)
class Naming:
    """What the server is called.

    Args:
        name: The registered model.
        alias: What it follows, or the number of a version.
        engine: What computes.
        paths: What engines are asked at.
    """

    name: str
    alias: str
    engine: str
    paths: tuple[str, ...]


def application(follower: Follower, naming: Naming) -> Starlette:
    """The app: the engine's paths, ``/v1/models``, ``/health`` and ``/upcycle``."""

    async def ask(request: Request) -> Response:
        return await _ask(request, follower)

    async def models(request: Request) -> Response:
        entry = {"id": naming.name, "object": "model", "created": 0, "owned_by": "upcycle"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(request: Request) -> Response:
        there = follower.current is not None
        return JSONResponse({"status": follower.state}, status_code=200 if there else 503)

    async def status(request: Request) -> Response:
        names = {"name": naming.name, "alias": naming.alias, "engine": naming.engine}
        return JSONResponse({**names, **follower.status()})

    return Starlette(
        routes=[
            *(Route(path, ask, methods=["POST"]) for path in naming.paths),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/upcycle", status),
        ],
        # A page of another site that a browser shows cannot name this server by its own host.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK, www_redirect=False)],
        exception_handlers={HTTPException: _refusal},
    )


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, str(error.detail), headers=error.headers)


def _problem(code: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the shape of OpenAI's."""
    kind = "invalid_request_error" if code < 500 else "server_error"
    said = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": said}, status_code=code, headers=headers)


async def _ask(request: Request, follower: Follower) -> Response:
    """Hand one request on; who leaves before the answer has begun cancels it."""
    try:
        content = await _content(request)
    except ClientDisconnect:
        return GONE
    answer = asyncio.create_task(_answer(request, content, follower))
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else GONE
    finally:
        gone.cancel()
        if not answer.done():
            answer.cancel()
            await asyncio.wait({answer})


async def _content(request: Request) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        HTTPException: It is none, is too long, or comes from a page of another site.
    """
    origin = httpx.URL(request.headers.get("origin") or "http://localhost")
    if origin.host not in LOOPBACK:
        raise HTTPException(403, f"pages of {origin.host} may not ask this server")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the body must be JSON, with Content-Type: application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_BODY:
            raise HTTPException(413, f"the body is longer than {LONGEST_BODY} bytes")
    try:
        content = json.loads(body)
        # NaN, and half of a pair of UTF-16: they can be read, and not be sent on.
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise HTTPException(400, "the body is JSON, but not an object")
    return content


async def _answer(request: Request, content: dict[str, Any], follower: Follower) -> Response:
    """The engine's answer, from its first bytes on; another engine's if this one dies before."""
    tries, refused_until = 0, None
    while True:
        try:
            engine = await follower.lease()
        except UnavailableError:
            message = f"no engine answers now; see /upcycle ({follower.state})"
            return _problem(503, message, {"Retry-After": RETRY_AFTER_SECONDS})
        try:
            if problem := await unfit(request.url.path, content, engine):
                return _refused(engine, problem)
            return await _begin(request, content, engine, follower)
        except (httpx.ConnectError, httpx.ConnectTimeout):  # it has heard nothing: the next one may
            engine.release()
            follower.doubt()
            refused_until = refused_until or time.monotonic() + follower.patience.hold
            if time.monotonic() > refused_until:
                message = "the engine lives and refuses connections; see /upcycle"
                return _problem(503, message, {"Retry-After": RETRY_AFTER_SECONDS})
        except httpx.TransportError as error:
            engine.release()
            tries += 1
            if tries >= TRIES:
                return _problem(502, f"the engine ended while it answered ({error!r})")
        except BaseException:
            engine.release()
            raise
        await asyncio.sleep(PAUSE_SECONDS)


async def _begin(
    request: Request, content: dict[str, Any], engine: Engine, follower: Follower
) -> Response:
    """Send the request and wait for the first bytes of the answer."""
    named = {} if engine.launch.model is None else {"model": engine.launch.model}
    sent = content | await within_context(content, engine) | named
    headers = {b"accept-encoding": b"identity"}
    headers |= {name: value for name, value in request.headers.raw if name == b"x-request-id"}
    asked = engine.client.build_request(
        "POST", engine.launch.url + request.url.path, json=sent, headers=headers
    )
    reply = await engine.client.send(asked, stream=True)
    try:
        if reply.status_code == 500 and engine.alive:
            # Nearly always the request's fault. As a 500, clients would send it again and again.
            said = (await reply.aread()).decode(errors="replace")[:500]
            message = f"the engine cannot work with this request ({said}); see {engine.launch.log}"
            await reply.aclose()
            return _refused(engine, message)
        chunks = reply.aiter_raw()
        first = await anext(chunks, b"")
    except BaseException:
        await reply.aclose()
        raise
    return _Passed(engine, reply, first, chunks, follower)


def _refused(engine: Engine, message: str) -> Response:
    engine.release()
    number = {VERSION_HEADER: str(engine.launch.number)}
    return _problem(400, message, number)


class _Passed(Response):
    """An answer of an engine, passed on piece by piece as it comes.

    Args:
        engine: Is at it until this has been sent.
        reply: The answer.
        first: Its first bytes.
        rest: The others.
        follower: Counts it.
    """

    def __init__(
        self,
        engine: Engine,
        reply: httpx.Response,
        first: bytes,
        rest: AsyncIterator[bytes],
        follower: Follower,
    ) -> None:
        self.engine, self.reply, self.first, self.rest = engine, reply, first, rest
        self.follower = follower

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; if the client leaves, the engine is told by a closed connection."""
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})
            await self.reply.aclose()
            self.engine.release()
        if sending.done() and not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        raw = [(name.lower(), value) for name, value in self.reply.headers.raw]
        raw = [(name, value) for name, value in raw if name in PASSED]
        raw.append((VERSION_HEADER.encode(), str(self.engine.launch.number).encode()))
        start = {"type": "http.response.start", "status": self.reply.status_code, "headers": raw}
        await send(start)
        try:
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            async for chunk in self.rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except httpx.TransportError:
            await self._cut(send)
            return
        self.engine.served += 1
        self.follower.served += 1
        await send({"type": "http.response.body", "body": b""})

    async def _cut(self, send: Send) -> None:
        """Say that the engine is gone; without its proper end, the answer is no whole one."""
        self.follower.cut += 1
        LOG.error("version %d: the engine ended in an answer", self.engine.launch.number)
        if "event-stream" in self.reply.headers.get("content-type", ""):
            message = "the engine ended in the middle of this answer"
            event = json.dumps({"error": {"message": message, "type": "server_error"}})
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unfit(path: str, content: dict[str, Any], engine: Engine) -> str | None:
    """Why the model cannot be asked this: a chat without a template, a text without room for it.

    Engines differ: to a chat one says "Internal Server Error"; of a text that is too long vLLM
    refuses it, and transformers goes on where the model has learned nothing.

    Returns:
        None of a request that fits.
    """
    if path in CHATS and not (engine.launch.chats or "chat_template" in content):
        return "the model has no chat template; send a prompt to /v1/completions"
    try:
        generation = _generation(content)
    except (TypeError, ValueError, RecursionError) as error:
        return f"{GENERATION} must be JSON text of an object ({error}); mend it or leave it out"
    for name, most in MOST_AT_ONCE.items():
        if generation.get(name) is not None and not _is_within(generation[name], most):
            return f"{GENERATION}: {name} = {generation[name]!r}; ask for {most} at most"
    room = engine.launch.context
    for text in _prompts(content):
        if room is None or _most_tokens(text) <= room:
            continue
        count = await asyncio.to_thread(engine.count_tokens, text)
        if count > room:
            remedy = "send a shorter one"
            return f"the prompt has {count} tokens, and the model room for {room}; {remedy}"
    return None


async def within_context(content: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Limits of new tokens that go beyond the model's context, cut to what the prompt leaves of it.

    transformers would go on where the model has learned nothing, and answer nobody else meanwhile.
    """
    room, texts = engine.launch.context, _prompts(content)
    if room is None or not _cut(content, room, room - max(map(_most_tokens, texts))):
        return {}
    counts = [await asyncio.to_thread(engine.count_tokens, text) for text in texts]
    return _cut(content, room, max(1, room - max(counts)))


def _cut(content: dict[str, Any], room: int, left: int) -> dict[str, Any]:
    """Fields whose limits go beyond what a prompt leaves of the room, with limits that do not."""
    cut: dict[str, Any] = {
        name: left for name in LIMITS if name in content and _whole(content[name]) > left
    }
    generation = _generation(content)
    limits = {"max_new_tokens": left, "max_length": room}  # the latter counts the prompt too
    inner = {
        name: limit
        for name, limit in limits.items()
        if generation.get(name) is not None and not _is_within(generation[name], limit)
    }
    return cut | ({GENERATION: json.dumps(generation | inner)} if inner else {})


def _generation(content: dict[str, Any]) -> dict[str, Any]:
    """What a request says in ``generation_config``; empty without one.

    Raises:
        TypeError, ValueError, RecursionError: It is no JSON text of an object.
    """
    text = content.get(GENERATION)
    found = {} if text is None else json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it holds something else")
    return found


def _is_within(value: Any, most: int) -> bool:
    """Whether it is a number of at most ``most``; NaN is within nothing."""
    return isinstance(value, int | float) and value <= most


def _whole(limit: Any) -> int:
    """A limit as engines read it; 0 of what they will refuse themselves."""
    try:
        return int(limit)
    except (TypeError, ValueError, OverflowError):
        return 0


def _prompts(content: dict[str, Any]) -> list[str]:
    """Texts that the model goes on from: a chat's messages are one, prompts of a list one each."""
    chat = "".join(_texts([content.get(name) for name in CHAT_PARTS]))
    return [chat, *_texts(content.get("prompt"))]


def _most_tokens(text: str) -> int:
    """A token is a byte at least."""
    return len(text.encode(errors="replace"))


def _texts(value: Any) -> Iterator[str]:
    """Every text of a prompt, or of the contents of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(
                part.get("content", part.get("text")) if isinstance(part, dict) else part
            )
