"""Chat models: their calibration and held-out text is chats, in the experts' own chat template."""

import json
import random
import sys

import numpy as np
import pytest
from chat import save_chat_tokenizer
from pico import save_pico
from project import Project
from texts import WORDS, save_recipe
from transformers import AutoTokenizer

from upcycle_core.corpora.reader import TokenCorpus, read_chats

# The flow with given experts: minutes.
pytestmark = pytest.mark.faults

DOMAINS = ("letters", "numbers")


def write_chats(path, domain, split):
    draw = random.Random(f"{domain} {split}")

    def words(count):
        return " ".join(draw.choice(WORDS[domain]) for _ in range(count))

    rows = [{"prompt": f"{words(9)} {split} {i}?", "response": words(12)} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"files": [str(path)], "form": "chat"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    domains = {}
    for seed, domain in enumerate(DOMAINS):
        expert = save_pico(folder / domain, seed=seed, vocab_size=400, bos_token_id=0)
        save_chat_tokenizer(expert, "llama3")
        domains[domain] = {
            "expert": str(expert),
            "calibration": write_chats(folder / f"{domain}.jsonl", domain, "calibration"),
            "heldout": write_chats(folder / f"{domain}-heldout.jsonl", domain, "heldout"),
        }
    values = {
        "name": "pico",
        "domains": domains,
        "statistics": {"sequence_length": 64, "batch_size": 4, "count": "responses"},
        "evaluation": {"sequence_length": 64, "random_routing_seeds": [0], "loss": "responses"},
        "compute": {"cpus": 2},
    }
    project = Project(folder, save_recipe(folder / "recipe.yaml", values))
    project.flow()
    return project


def test_what_is_counted_and_scored_are_the_responses_of_the_tokenizers_own_ids(project):
    tokenizer = AutoTokenizer.from_pretrained(project.workspace / "model")
    metrics = json.loads((project.workspace / "report" / "metrics.json").read_text())
    assert metrics["perplexity"]["dume"]["letters"] > 1
    for domain in DOMAINS:
        for split in ("calibration", "heldout"):
            documents = project.workspace / "documents" / domain / f"{split}.parquet"
            corpus = TokenCorpus(project.workspace / "corpora" / domain / split)
            responses = 0
            for index, chat in enumerate(read_chats(documents)):
                own = tokenizer.apply_chat_template(chat.messages, return_dict=False)
                assert corpus.document(index).tolist() == own
                answer = chat.messages[-1]["content"] + "<|eot_id|>"
                responses += len(tokenizer(answer, add_special_tokens=False)["input_ids"])
            assert index == 29
            assert np.count_nonzero(corpus.responses) == responses


def test_the_registered_model_answers_a_chat(project):
    command = [sys.executable, "-m", "flows.generate", "upcycle-pico@champion", "one two?"]
    options = ["--tokens", "5", "--temperature", "0"]
    chat = project.run(*command, "--chat", *options).stdout
    text = project.run(*command, *options).stdout
    assert text.startswith("one two?")
    assert not chat.startswith(("one two?", "user"))
