"""Engines whose process lives: one that hangs is replaced, one that is busy never."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

from infra.serving import follower as following
from infra.serving import pulse
from infra.serving.engine import Launch, free_port
from infra.serving.follower import Follower, Patience
from infra.serving.front import Naming, application

SECONDS = 120
PATH = "/v1/completions"
ENGINE = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        end = time.monotonic() + body.get("busy", 0)
        while time.monotonic() < end:
            pass
        self.answer()
        self.server.deaf = body.get("deaf", False)

    def answer(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

with HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
    server.deaf = False
    while not server.deaf:
        server.handle_request()
time.sleep(1000)
"""
"""It answers one request after the other; asked to, it computes meanwhile, or listens no more."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(following, "DOUBT_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "ANSWER_SECONDS", 0.5)


@asynccontextmanager
async def answering(folder, **patience):
    """A follower whose engine has come up, and a client of its front."""

    def launch(number):
        port = free_port()
        asked = {"port": port, "health": "/health", "trial": (PATH, {}), "model": None}
        files = {"folder": folder, "log": folder / "engine.log", "tokenizer": folder}
        command = (sys.executable, "-c", ENGINE, str(port))
        kind = {"context": None, "chats": False, "weights": 0}
        return Launch(number, command, os.environ, **files, **asked, **kind)

    follower = Follower(lambda: (1, 0), launch, patience=Patience(**patience), swap="beside")
    app = application(follower, Naming("moe", "champion", "transformers", (PATH,)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        try:
            await follower.begin()
            async with asyncio.timeout(SECONDS):
                yield follower, client
        finally:
            await follower.end()


def process_of(follower):
    """What computes, below the keeper."""
    [process] = psutil.Process(follower.current.pid).children()
    return process


def test_an_engine_that_hangs_is_started_again_and_its_requests_are_answered(tmp_path):
    async def run():
        async with answering(tmp_path) as (follower, client):
            hung = process_of(follower)
            hung.send_signal(signal.SIGSTOP)
            assert (await client.post(PATH, json={})).status_code == 200
            assert not hung.is_running()
            assert process_of(follower) != hung
            assert "the engine hung" in follower.status()["last_failure"]["message"]

    asyncio.run(run())


def test_an_engine_that_is_too_busy_to_say_that_it_is_there_goes_on(tmp_path, monkeypatch):
    asked, illness = [], pulse.Pulse.illness

    async def counted(self):
        asked.append(found := await illness(self))
        return found

    monkeypatch.setattr(pulse.Pulse, "illness", counted)

    async def run():
        async with answering(tmp_path) as (follower, client):
            busy, before = process_of(follower), len(asked)
            seconds = 2 * pulse.SILENCES * pulse.ANSWER_SECONDS
            assert (await client.post(PATH, json={"busy": seconds})).status_code == 200
            assert len(asked) - before >= pulse.SILENCES
            assert process_of(follower) == busy
            assert follower.status()["last_failure"] is None

    asyncio.run(run())


def test_an_engine_that_listens_no_more_is_started_again(tmp_path):
    async def run():
        async with answering(tmp_path) as (follower, client):
            deaf = process_of(follower)
            assert (await client.post(PATH, json={"deaf": True})).status_code == 200
            assert (await client.post(PATH, json={})).status_code == 200
            assert process_of(follower) != deaf
            assert "refused connections" in follower.status()["last_failure"]["message"]

    asyncio.run(run())


def test_an_engine_that_the_front_cannot_ask_for_a_lack_of_its_own_goes_on(tmp_path, monkeypatch):
    async def lacking(*args, **options):
        raise httpx.ConnectError("Too many open files")

    async def run():
        async with answering(tmp_path) as (follower, _):
            monkeypatch.setattr(follower.client, "get", lacking)
            look = pulse.Pulse(follower.current)
            assert [await look.illness() for _ in range(2 * pulse.REFUSALS)] == [None] * 20

    asyncio.run(run())


def test_a_request_that_no_engine_hears_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "REFUSALS", 10**6)

    async def run():
        async with answering(tmp_path, hold=0.5) as (_, client):
            assert (await client.post(PATH, json={"deaf": True})).status_code == 200
            reply = await client.post(PATH, json={})
            assert reply.status_code == 503
            assert reply.headers["Retry-After"]
            assert "refuses connections" in reply.text

    asyncio.run(run())
