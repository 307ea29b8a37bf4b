"""A server of a registered model, as `python -m flows.serve` starts it, and what it is asked."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SECONDS = 600
PLAIN: dict[str, Any] = {"timeout": SECONDS, "trust_env": False, "verify": False}
"""Of a client: no proxy, and no authorities, which take 20 ms of a CPU to read each time."""
TOKENS = 8
PROMPTS = ("ab", "12+3", "The", "x", "hello you", "{}")


@dataclass(frozen=True)
class Reply:
    """What came back: the version that answered, the text, whether it has its end."""

    version: int
    text: str
    whole: bool


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen
    url: str
    log: Path

    def status(self) -> dict:
        """``GET /upcycle``."""
        return httpx.get(f"{self.url}/upcycle", **PLAIN).json()

    def wait(self, seconds: float = SECONDS, **expected) -> dict:
        """Wait until the status has these values, for ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status()
            if expected.items() <= status.items():
                return status
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{status}\n{self.log.read_text()}"
            time.sleep(0.1)

    def ask(self, prompt: str, *, stream: bool = False, tokens: int = TOKENS) -> Reply:
        """The greedy continuation of a prompt."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "model": "anything"}
        url = f"{self.url}/v1/completions"
        with httpx.Client(**PLAIN) as client:
            if not stream:
                reply = client.post(url, json=body)
                assert reply.status_code == 200, reply.text
                [choice] = reply.json()["choices"]
                version = int(reply.headers["x-upcycle-version"])
                return Reply(version, choice["text"], choice["finish_reason"] is not None)
            with client.stream("POST", url, json=body | {"stream": True}) as reply:
                lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert not any("error" in event for event in events), events
        choices = [event["choices"][0] for event in events]
        text = "".join(choice["text"] for choice in choices)
        whole = choices[-1].get("finish_reason") is not None
        return Reply(int(reply.headers["x-upcycle-version"]), text, whole)

    def engines(self) -> list[psutil.Process]:
        """The processes that compute, below their keepers."""
        engines = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or nearly
                line = process.cmdline()
                engine, keeper = "tasks.serving.transformers_engine", "infra.serving.keeper"
                if engine in line and keeper not in line:
                    engines.append(process)
        return engines


def environment(home: Path) -> dict[str, str]:
    """Of a command whose home that is."""
    unnamed = {
        k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "PREFECT_HOME")
    }
    return {**unnamed, "UPCYCLE_HOME": str(home), "OMP_NUM_THREADS": "1"}


@contextmanager
def served(home: Path, *arguments: str) -> Iterator[Server]:
    """A server on a free port; it is stopped afterwards and has left nothing."""
    log = home / f"front-{time.monotonic_ns()}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.serve", *arguments, "--port", "0", "--device", "cpu"],
            stdout=output,
            stderr=output,
            env=environment(home),
        )
    server = Server(process, "", log)
    try:
        deadline = time.monotonic() + SECONDS
        while " answers at " not in (text := log.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        server.url = text.rpartition(" answers at ")[2].split()[0]
        yield server
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(timeout=60)
            assert not psutil.wait_procs(family, timeout=60)[1], "it has left a process"


def greedy(directory: Path, tokens: int = TOKENS) -> dict[str, str]:
    """{prompt: continuation} by stock transformers."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        found[prompt] = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    return found
