"""A pico MoE in a registry of its own, and the page's command run upon it."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from prefect_server import free_port
from project import ROOT, TIMEOUT

from infra.settings import read
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tests.chat import save_chat_tokenizer
from tests.upcycle_core.moe.joined import join

DOMAINS = ("python", "law", "numbers")
CONTEXT = 512
LAYERS = 8
ENDLESS = {"eos_token_id": None, "pad_token_id": None}


def save_talkative(folder: Path) -> Path:
    """A MoE of bytes that never ends by itself, with a chat template; slow enough to be stopped."""
    shape = {"vocab_size": 512, "max_position_embeddings": CONTEXT, "num_hidden_layers": LAYERS}
    model = join(folder, top_k=2, **shape, **ENDLESS).model
    save_chat_tokenizer(model, "chatml")
    return model


def register(home: Path, name: str, model: Path, *, domains: tuple[str, ...] = ()) -> None:
    """As the champion ``name`` of the registry in ``home``."""
    place = read({"UPCYCLE_HOME": str(home)})
    recipe = {"name": "pico", "domains": dict.fromkeys(domains)}
    given = Registration(
        files={"recipe.yaml": yaml.safe_dump(recipe, sort_keys=False)} if domains else {}
    )
    registry = Registry(place)
    with Tracker(place, "flows").start_run(name) as run:
        version = registry.register(name, model, given, run=run)
    registry.set_alias(version, "champion")


@dataclass
class Talk:
    """The command at work.

    Args:
        port: Where its page is.
        process: The command.
        log: What it prints.
    """

    port: int
    process: subprocess.Popen
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An answer, not read yet, and its connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, path, body, named)
        return connection, connection.getresponse()

    def ask(self, **question: object) -> tuple[http.client.HTTPConnection, Iterator[dict]]:
        """The connection, and the events as they come."""
        body = json.dumps(question).encode()
        connection, answer = self.request("POST", "/answers", body, content_type="application/json")
        return connection, (json.loads(line) for line in answer)

    def all_of(self, **question: object) -> list[dict]:
        """All events of an answer."""
        connection, events = self.ask(**question)
        with contextlib.closing(connection):
            return list(events)


@contextlib.contextmanager
def talk(home: Path, name: str) -> Iterator[Talk]:
    """``python -m flows.chat NAME@champion``, until it is left."""
    port, log = free_port(), home / f"{name}.log"
    command = [sys.executable, "-m", "flows.chat", f"{name}@champion", "--port", str(port)]
    environment = {**os.environ, "UPCYCLE_HOME": str(home), "PREFECT_HOME": str(home / "prefect")}
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"
    environment["OMP_NUM_THREADS"] = (
        "1"  # threads that wait for each other starve on a busy machine
    )
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--device", "cpu"], cwd=ROOT, env=environment, stdout=out, stderr=out
        )
    served = Talk(port, process, log)
    try:
        wait(lambda: served.url.rstrip("/") in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def wait(until: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)
