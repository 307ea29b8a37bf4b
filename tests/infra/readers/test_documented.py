"""What docs/serving.md says of each reader, run as it stands there."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from elsewhere import Elsewhere, home_with_port, mlflow_server_of
from serving import served
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.readers.environments import CONVERTER, LLAMA_CPP, VLLM
from infra.readers.reader import TO_GGUF
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tests.tasks.release.test_certify import build, tokenizer  # noqa: F401  (a fixture)
from tests.test_documents import ROOT

PROMPT = "The first"
ANSWERS = """
settings = {"max_new_tokens": 20, "do_sample": False}
print([pipeline("The first", return_full_text=False, **settings)[0]["generated_text"]])
ids = tokenizer("The first", return_tensors="pt")["input_ids"]
said = model.generate(ids, **settings)[0, ids.shape[1] :]
print([tokenizer.decode(said, skip_special_tokens=True)])
"""
"""What the pipeline and the model answer that the documentation's lines have loaded."""


def block(word):
    """The block of Python that names ``word``."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/serving.md").read_text(), re.M | re.S
    )
    [found] = [text for text in blocks if word in text]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):  # noqa: F811  (the fixture)
    """A folder with a MoE called ``demo``."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(build(place / "made", tokenizer), place / "demo")
    return place


@pytest.fixture(scope="module")
def home(folder, tmp_path_factory):
    """A home in which that MoE is the champion of ``upcycle-demo``."""
    place = home_with_port(tmp_path_factory.mktemp("place") / "home")
    registry = Registry(place)
    with Tracker(place, "flows").start_run("demo") as run:
        version = registry.register("upcycle-demo", folder / "demo", Registration(), run=run)
    registry.set_alias(version, "champion")
    return place


def greedy(folder, tokens=20):
    """What stock transformers makes of the prompt."""
    names = AutoTokenizer.from_pretrained(folder / "demo")
    model = AutoModelForCausalLM.from_pretrained(folder / "demo", dtype=torch.float32)
    ids = names(PROMPT, return_tensors="pt")["input_ids"]
    rest = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 1}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **rest)
    return names.decode(said[0, ids.shape[1] :], skip_special_tokens=True)


def run(python, text, folder):
    (folder / "lines.py").write_text(text)
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    words = [str(python), "lines.py"]
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.faults
def test_mlflow_and_transformers_say_it_with_the_address_alone(folder, home, tmp_path):
    with mlflow_server_of(home) as address:
        colleague = Elsewhere(tmp_path, home.home, address)
        said = colleague.run("-c", block("mlflow.pyfunc") + ANSWERS)
    assert said.splitlines()[-3:] == 3 * [str([greedy(folder)])]
    assert (tmp_path / "demo" / "model.safetensors").is_file()


@pytest.mark.faults
def test_a_client_of_openai_is_answered_by_the_server(folder, home):
    with served(home.home, "upcycle-demo@champion") as server:
        lines = block("openai").replace("http://127.0.0.1:8000", server.url)
        asked = lines.replace("max_tokens=20", "max_tokens=20, temperature=0")
        assert run(sys.executable, asked, folder) == greedy(folder) + "\n"


@pytest.mark.faults
def test_vllm_says_what_transformers_says(folder):
    assert VLLM.ready, "make readers"
    assert greedy(folder)[:10] in run(VLLM.python, block("vllm"), folder)


@pytest.mark.faults
def test_llama_cpp_says_what_transformers_says(folder):
    assert LLAMA_CPP.ready, "make readers"
    words = [sys.executable, str(TO_GGUF), str(CONVERTER.folder), "demo", "f16", "demo.gguf"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    assert greedy(folder)[:10] in run(LLAMA_CPP.python, block("xllamacpp"), folder)
