import json
import os
import subprocess
import sys

import pytest
from project import ROOT

from tests.pico import pico_config
from upcycle_core.checkpoints.card import write_model_card
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.files import ARCHITECTURE
from upcycle_core.ders.upcycle import ders_config

WRITING = """
import json, sys
from pathlib import Path
from upcycle_core.checkpoints.card import write_model_card
write_model_card(Path(sys.argv[1]), **json.loads(sys.argv[2]))
"""
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_experts_per_tok": 1,
    "dtype": "float32",
}


def ders() -> dict:
    """The config.json of a DeRS model."""
    dense = pico_config(num_hidden_layers=3).to_dict()
    config = ders_config(dense, DersUpcyclingConfig(rank=4), experts=4, top_k=2)
    return config.to_dict() | ARCHITECTURE | {"dtype": "bfloat16"}


def card(directory, config=MIXTRAL, **changes) -> str:
    arguments = {
        "title": "demo",
        "recipe_text": "name: demo\nnote: |\n  ```\n  fenced\n  ```\n",
        "method": "DUME",
        "experts": ["law", "code"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_model_card(directory, **(arguments | changes))
    return (directory / "README.md").read_text()


def test_the_card_says_what_it_is_and_how_it_was_made(tmp_path):
    text = card(tmp_path)
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "license:" not in text
    for part in ("# demo", "DUME", "MixtralForCausalLM", "| 0 | law |", "| 1 | code |"):
        assert part in text
    assert "````yaml\nname: demo" in text  # a fence longer than the one inside


@pytest.mark.parametrize(
    ("config", "rows", "options"),
    [
        (MIXTRAL, ("MixtralForCausalLM", 2, 32, 1, "float32"), ""),
        # The dense model's sizes lie in ``dense``, and transformers does not know the classes.
        (ders(), ("DersForCausalLM", 3, 32, 2, "bfloat16"), ", trust_remote_code=True"),
    ],
    ids=["stock", "ders"],
)
def test_the_card_says_sizes_and_how_to_load_it(tmp_path, config, rows, options):
    text = card(tmp_path, config)
    names = ("architecture", "layers", "hidden size", "experts a token", "weights")
    table = [f"| {name} | {value} |" for name, value in zip(names, rows, strict=True)]
    assert "\n".join(["| what | value |", "| --- | --- |", *table, ""]) in text
    assert f'AutoModelForCausalLM.from_pretrained("PATH"{options})\n' in text


def test_a_licence_goes_to_the_front(tmp_path):
    assert "license: apache-2.0\n" in card(tmp_path, licence="apache-2.0")


def test_the_card_is_the_same_in_every_process(tmp_path):
    """However it orders a set."""
    arguments = {
        "title": "demo",
        "recipe_text": "name: demo",
        "method": "DUME",
        "experts": ["law", "code"],
        "given": {"law": "vocab_size: 96 -> 128", "code": "dtype: a -> b"},
    }
    texts = {card(tmp_path, **arguments)}
    command = [sys.executable, "-c", WRITING, str(tmp_path), json.dumps(arguments)]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, check=True)
        texts.add((tmp_path / "README.md").read_text())
    assert len(texts) == 1


def test_what_was_changed_in_an_expert_is_said(tmp_path):
    text = card(tmp_path, given={"law": "vocab_size: 96 -> 128; dtype: a -> b"})
    assert "\n- law: vocab_size: 96 -> 128; dtype: a -> b\n" in text


def test_a_model_that_answers_is_shown_being_asked(tmp_path):
    text = card(tmp_path, experts=[], form="Ask it as its template writes.")
    assert "inputs = tokenizer.apply_chat_template(\n" in text
    assert "\nAsk it as its template writes.\n" in text
    assert "apply_chat_template" not in card(tmp_path)
