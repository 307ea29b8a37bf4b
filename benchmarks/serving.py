"""Tokens a second through the server, from its engine directly, and from plain ``model.generate``.

    python -m benchmarks.serving [--repeats N] [--tokens N] [--clients N]

Llama, H 256, I 704, 8 layers, in fp32 on a CPU, one prompt of 16 tokens, greedy. ``transformers
serve`` computes one request after the other. The three take turns in one run; besides, streamed
answers, whose every token is passed on alone, and several clients at once. The ratio is that to
``model.generate`` (``engine``, ``front``), and that of the front to its engine.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.children import ROOT
from benchmarks.common import (
    alternate,
    median,
    median_ratio,
    parser_of,
    print_result,
    print_table,
    seconds_of,
)
from benchmarks.models import SHAPE, save_word_tokenizer
from infra.settings import configure
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker

PROMPT = " ".join(f"w{i}" for i in range(1, 17))
PATH = "/v1/completions"
START_SECONDS = 300


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=7)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serving-") as home:
        model = _register(Path(home))
        process = _start(Path(home))
        try:
            rates = _measure(model, process, options)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    plain, front = rates["model.generate"], rates["front"]
    rows = [[name, median(rate), median_ratio(rate, plain)] for name, rate in rates.items()]
    title = f"{options.tokens} tokens an answer, {torch.get_num_threads()} threads"
    print_table(title, ["", "tokens/s", "over model.generate"], rows)
    ratio = {
        "engine / generate": median_ratio(rates["engine"], plain),
        "front / generate": median_ratio(front, plain),
        "front / engine": median_ratio(front, rates["engine"]),
        "front / engine, streamed": median_ratio(
            rates["front, streamed"], rates["engine, streamed"]
        ),
        f"front / engine, {options.clients} clients": median_ratio(
            rates[f"front, {options.clients} clients"], rates[f"engine, {options.clients} clients"]
        ),
    }
    print_result("serving", ratio, {"tokens_per_second": rates})


def _register(home: Path) -> Path:
    """A random model, champion of a registry of its own."""
    torch.manual_seed(0)
    folder = home / "model"
    LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)).save_pretrained(folder)
    save_word_tokenizer(folder)
    os.environ["UPCYCLE_HOME"] = str(home)
    settings = configure()
    registry = Registry(settings)
    with Tracker(settings, "benchmark").start_run("served") as run:
        version = registry.register("served", folder, Registration(), run=run)
    registry.set_alias(version, "champion")
    return folder


def _start(home: Path) -> subprocess.Popen:
    """The server; it is up when the first engine is."""
    threads = str(torch.get_num_threads())
    return subprocess.Popen(
        [sys.executable, "-m", "flows.serve", "served@champion", "--port", "0", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": threads},
        stdout=(home / "front.log").open("wb"),
        stderr=subprocess.STDOUT,
    )


def _measure(model: Path, process: subprocess.Popen, options: Any) -> dict[str, list[float]]:
    """{what: tokens a second of each round}."""
    urls = {"engine": _engine(process), "front": _front(model.parent / "front.log")}
    calls: dict[str, Callable[[], object]] = {"model.generate": _plain(model, options.tokens)}
    with httpx.Client(timeout=START_SECONDS, trust_env=False) as client:
        for name, url in urls.items():
            ask = partial(_ask, client, url, options.tokens)
            calls[name] = ask
            calls[f"{name}, streamed"] = partial(ask, stream=True)
            calls[f"{name}, {options.clients} clients"] = partial(_crowd, ask, options.clients)
        alternate(calls, 1)  # warm-up
        timed = {name: partial(seconds_of, call) for name, call in calls.items()}
        seconds = alternate(timed, options.repeats)
    tokens = {
        name: options.tokens * (options.clients if "clients" in name else 1) for name in calls
    }
    return {name: [tokens[name] / s for s in taken] for name, taken in seconds.items()}


def _plain(directory: Path, tokens: int) -> Callable[[], object]:
    network: Any = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(1, 17)[None]
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    return partial(network.generate, ids, attention_mask=torch.ones_like(ids), **how)


def _ask(client: httpx.Client, url: str, tokens: int, *, stream: bool = False) -> None:
    generation = json.dumps({"max_new_tokens": tokens, "min_new_tokens": tokens})
    body = {"prompt": PROMPT, "generation_config": generation, "temperature": 0, "stream": stream}
    with client.stream("POST", url + PATH, json=body) as reply:
        text = reply.read().decode()
        if reply.status_code != 200 or f'"completion_tokens":{tokens}' not in text:
            raise RuntimeError(f"{reply.status_code} {text[-500:]}")


def _crowd(ask: Callable[[], None], clients: int) -> None:
    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(ask) for _ in range(clients)]:
            done.result()


def _front(log: Path) -> str:
    """Where the server answers, once it does."""
    deadline = time.monotonic() + START_SECONDS
    while " answers at " not in (text := log.read_text()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no server:\n{text}")
        time.sleep(0.2)
    return text.rpartition(" answers at ")[2].split()[0]


def _engine(process: subprocess.Popen) -> str:
    """Where the engine listens, below the server."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            words = child.cmdline()
            if "--port" in words and "tasks.serving.transformers_engine" in words:
                return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        time.sleep(0.2)
    raise RuntimeError("no engine; see the server's log")


if __name__ == "__main__":
    main()
