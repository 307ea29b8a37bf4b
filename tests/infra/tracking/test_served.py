"""A registered version as MLflow's own tools see it: loaded, asked and served, without our code.

They run on another machine: they know the address of the server, and see nothing of the home, which
has been moved since.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from elsewhere import Elsewhere, home_with_port, mlflow_server_of
from mlflow.models import get_model_info
from prefect_server import free_port
from project import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tests.upcycle_core.evaluation.tasks.addition import save_adder
from tests.upcycle_core.simoe.grown import grow
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

QUESTIONS = ["12+34=", "5+5="]
KINDS = ["moe", *(pytest.param(kind, marks=pytest.mark.faults) for kind in ("simoe", "ders"))]
ELSEWHERE = """
import json, sys
sys.modules["upcycle_core"] = sys.modules["infra"] = sys.modules["tasks"] = None
import mlflow
model = mlflow.pyfunc.load_model(sys.argv[1])
said = model.predict(json.loads(sys.argv[2]), params={"max_new_tokens": 5})
warm = {"max_new_tokens": 5, "temperature": 5.0, "seed": 3}
twice = [model.predict(json.loads(sys.argv[2]), params=warm) for _ in range(2)]
print(json.dumps([said, *twice]))
"""
FLAVOUR = """
import json, sys
import mlflow
pipeline = mlflow.transformers.load_model(sys.argv[1])
settings = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
found = [pipeline(question, **settings) for question in json.loads(sys.argv[2])]
print(json.dumps([said[0]["generated_text"] for said in found]))
"""
DOWNLOAD = """
import sys
import mlflow
print(mlflow.artifacts.download_artifacts(sys.argv[1], dst_path=sys.argv[2]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The home, and later where it is."""
    return home_with_port(tmp_path_factory.mktemp("place") / "home")


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
    codec = CodecConfig(codec="quantised", bits=4)
    compress(folder / "moe", folder / "ders", base=None, config=codec, minimum_cosine=-1)
    tracker, registry = Tracker(place, "flows"), Registry(place)
    kinds = ("moe", "simoe", "ders")
    for name in kinds:
        with tracker.start_run(name) as run:
            version = registry.register(name, folder / name, Registration(), run=run)
        registry.set_alias(version, "champion")
    return {name: folder / name for name in kinds}


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


@pytest.fixture(scope="module")
def moved(place, registered):
    """The home at another place than where the models were registered."""
    home = place.home.with_name("moved")
    place.home.rename(home)
    return home_with_port(home)


@pytest.fixture(scope="module")
def elsewhere(moved, tmp_path_factory):
    """A machine that has the server's address alone."""
    with mlflow_server_of(moved) as address:
        yield Elsewhere(tmp_path_factory.mktemp("elsewhere"), moved.home, address)


def test_another_machine_sees_no_file_of_the_home(elsewhere, moved):
    with pytest.raises(AssertionError, match="out of sight"):
        elsewhere.run("-c", f"open({str(moved.mlflow_artifacts.parent / 'home-id')!r})")


@pytest.mark.parametrize("kind", KINDS)
def test_mlflow_loads_and_asks_it_where_nothing_of_ours_is(elsewhere, registered, kind):
    said = elsewhere.run("-c", ELSEWHERE, f"models:/{kind}@champion", json.dumps(QUESTIONS))
    said, warm, again = json.loads(said.splitlines()[-1])
    assert said == [continued(registered[kind], question) for question in QUESTIONS]
    assert warm == again != said


def test_its_page_says_how_it_is_asked(moved, registered):
    Registry(moved)  # without a server, MLflow finds files through it
    info = get_model_info("models:/moe@champion")
    assert [str(kind) for kind in info.signature.inputs.input_types()] == ["DataType.string"]
    names = {param.name: param.default for param in info.signature.params}
    assert names == {"max_new_tokens": 100, "temperature": 0.0, "seed": 0, "chat": False}
    assert set(info.flavors) == {"python_function", "transformers"}


@pytest.mark.parametrize("kind", KINDS)
def test_its_flavour_of_transformers_loads_too(elsewhere, registered, kind):
    said = elsewhere.run("-c", FLAVOUR, f"models:/{kind}@champion", json.dumps(QUESTIONS))
    expected = [continued(registered[kind], question) for question in QUESTIONS]
    assert json.loads(said.splitlines()[-1]) == expected


def test_what_is_downloaded_there_is_a_checkpoint(elsewhere, registered):
    out = elsewhere.folder / "downloaded"
    said = elsewhere.run("-c", DOWNLOAD, "models:/moe@champion", str(out))
    assert Path(said.splitlines()[-1]) == out
    expected = continued(registered["moe"], QUESTIONS[0])
    assert continued(out, QUESTIONS[0]) == expected
    for file in registered["moe"].iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()


def test_our_own_command_generates_there(elsewhere, registered):
    options = ("--temperature", "0", "--tokens", "5")
    command = ("-m", "flows.generate", "moe@champion", QUESTIONS[0], *options)
    said = elsewhere.run(*command, cwd=ROOT)
    assert said.strip() == QUESTIONS[0] + continued(registered["moe"], QUESTIONS[0])
    assert list((elsewhere.folder / "workspace" / "models").rglob("model.safetensors"))


def test_the_checkpoint_lies_beside_it_unchanged(moved, registered, tmp_path):
    out = Registry(moved).download("models:/simoe@champion", tmp_path / "out")
    for file in registered["simoe"].iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()
    needed = (out / "requirements.txt").read_text()
    assert f"torch=={torch.__version__.partition('+')[0]}" in needed
    assert "transformers==" in needed
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert sum(p.numel() for p in again.parameters())


@pytest.mark.faults
def test_mlflow_serves_it(elsewhere, registered):
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/moe@champion"]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    own = {"env": elsewhere.environment, "cwd": elsewhere.folder, "start_new_session": True}
    server = subprocess.Popen(command, **own)
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
