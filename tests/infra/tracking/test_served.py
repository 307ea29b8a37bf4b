"""A registered version as MLflow's own tools see it: loaded, asked and served, without our code."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import mlflow
import pytest
import torch
from mlflow.models import get_model_info
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra import settings
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tests.upcycle_core.evaluation.tasks.addition import save_adder
from tests.upcycle_core.simoe.grown import grow
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

QUESTIONS = ["12+34=", "5+5="]
ELSEWHERE = """
import json, sys
sys.modules["upcycle_core"] = sys.modules["infra"] = sys.modules["tasks"] = None
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
said = model.predict(json.loads(sys.argv[3]), params={"max_new_tokens": 5})
warm = {"max_new_tokens": 5, "temperature": 5.0, "seed": 3}
twice = [model.predict(json.loads(sys.argv[3]), params=warm) for _ in range(2)]
print(json.dumps([said, *twice]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return settings.read({"UPCYCLE_HOME": str(tmp_path_factory.mktemp("home"))})


@pytest.fixture(scope="module")
def registered(place, tmp_path_factory):
    """{kind: checkpoint}, each registered as KIND, champion."""
    folder = tmp_path_factory.mktemp("models")
    dense = save_adder(folder / "dense")
    config = AutoModelForCausalLM.from_pretrained(dense).config
    routers = random_routers(config.num_hidden_layers, config.hidden_size, 2, seed=0)
    assemble(
        {"a": dense, "b": dense}, None, routers, folder / "moe", top_k=1, max_shard_bytes=10**9
    )
    network = upcycle_in_memory(dense, SimoeUpcyclingConfig(experts=3), seed=1)
    save_pruned(grow(network), dense, folder / "simoe")
    tracker, registry = Tracker(place, "flows"), Registry(place)
    for name in ("moe", "simoe"):
        with tracker.start_run(name) as run:
            version = registry.register(name, folder / name, Registration(), run=run)
        registry.set_alias(version, "champion")
    return {name: folder / name for name in ("moe", "simoe")}


def continued(directory, question, tokens=5):
    """Greedy, by stock transformers."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    ids = tokenizer(question, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["moe", "simoe"])
def test_mlflow_loads_and_asks_it_where_nothing_of_ours_is(place, registered, kind):
    reference = f"models:/{kind}@champion"
    command = [sys.executable, "-c", ELSEWHERE, place.mlflow_tracking_uri, reference]
    done = subprocess.run([*command, json.dumps(QUESTIONS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, warm, again = json.loads(done.stdout.splitlines()[-1])
    assert said == [continued(registered[kind], question) for question in QUESTIONS]
    assert warm == again != said


def test_its_page_says_how_it_is_asked(place, registered):
    mlflow.set_tracking_uri(place.mlflow_tracking_uri)
    info = get_model_info("models:/moe@champion")
    assert [str(kind) for kind in info.signature.inputs.input_types()] == ["DataType.string"]
    names = {param.name: param.default for param in info.signature.params}
    assert names == {"max_new_tokens": 100, "temperature": 0.0, "seed": 0, "chat": False}
    assert set(info.flavors) == {"python_function", "transformers"}


@pytest.mark.parametrize("kind", ["moe", "simoe"])
def test_its_flavour_of_transformers_loads_too(place, registered, kind):
    mlflow.set_tracking_uri(place.mlflow_tracking_uri)
    pipeline = mlflow.transformers.load_model(f"models:/{kind}@champion")
    settings = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    found = [pipeline(question, **settings)[0]["generated_text"] for question in QUESTIONS]
    assert found == [continued(registered[kind], question) for question in QUESTIONS]


def test_the_checkpoint_lies_beside_it_unchanged(place, registered, tmp_path):
    out = Registry(place).download("models:/simoe@champion", tmp_path / "out")
    for file in registered["simoe"].iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()
    needed = (out / "requirements.txt").read_text()
    assert f"torch=={torch.__version__.partition('+')[0]}" in needed
    assert "transformers==" in needed
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert sum(p.numel() for p in again.parameters())


@pytest.mark.faults
def test_mlflow_serves_it(place, registered):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/moe@champion"]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # uvicorn's place
    changed = {"MLFLOW_TRACKING_URI": place.mlflow_tracking_uri, "PATH": programs}
    environment = {**os.environ, **changed}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        asked = {"inputs": QUESTIONS, "params": {"max_new_tokens": 5}}
        said = answered(f"http://127.0.0.1:{port}/invocations", asked)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    expected = [continued(registered["moe"], question) for question in QUESTIONS]
    assert said["predictions"] == expected


def answered(url, asked, seconds=120):
    """What a server says once it is there."""
    request = urllib.request.Request(
        url, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                return json.load(reply)
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
