"""The end of a chat's response among the ids that end generation."""

import json

import pytest
import torch
from chat import save_chat_tokenizer
from pico import save_pico
from transformers import AutoModelForCausalLM, AutoTokenizer

from upcycle_core.corpora.chat_end import name_chat_end
from upcycle_core.moe.assemble import assemble

PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
REFUSES = "{{ raise_exception('only for machines') }}"
BREAKS = "{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}"
END = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}


def with_config(directory, kind, told, **options):
    save_chat_tokenizer(directory, kind, **options)
    if told is not None:
        (directory / "generation_config.json").write_text(json.dumps(told))
    return directory


def told(directory):
    return json.loads((directory / "generation_config.json").read_text())


@pytest.mark.parametrize("kind", END)
@pytest.mark.parametrize("own", [7, [7, 8], None])
def test_the_template_s_end_comes_behind_the_model_s_own(tmp_path, kind, own):
    before = {"_from_model_config": True, "eos_token_id": own, "temperature": 0.5}
    name_chat_end(with_config(tmp_path, kind, before))
    end = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(END[kind])
    expected = {"7": [7, end], "[7, 8]": [7, 8, end], "None": [end]}
    assert told(tmp_path)["eos_token_id"] == expected[str(own)]
    assert told(tmp_path)["temperature"] == 0.5
    # With it transformers takes the ids of config.json in place of these.
    assert "_from_model_config" not in told(tmp_path)


def test_an_end_that_is_named_changes_no_byte(tmp_path):
    name_chat_end(with_config(tmp_path, "chatml", {"eos_token_id": 7}))
    once = (tmp_path / "generation_config.json").read_bytes()
    name_chat_end(tmp_path)
    assert (tmp_path / "generation_config.json").read_bytes() == once


@pytest.mark.parametrize("template", [None, PLAIN, REFUSES, BREAKS])
def test_what_no_special_token_ends_is_left(tmp_path, template):
    config = {"_from_model_config": True, "eos_token_id": 7}
    name_chat_end(with_config(tmp_path, "chatml", config, template=template))
    assert told(tmp_path) == config


def test_white_space_behind_the_end_is_no_end(tmp_path):
    """ChatML writes a line end behind each."""
    name_chat_end(with_config(tmp_path, "chatml", None))
    end = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<|im_end|>")
    assert told(tmp_path) == {"eos_token_id": [end]}


def test_a_joined_model_stops_where_a_response_ends(tmp_path):
    experts = {}
    for seed, name in enumerate("ab"):
        experts[name] = save_pico(tmp_path / name, vocab_size=400, seed=seed)
        save_chat_tokenizer(experts[name], "chatml")
    routers = {layer: torch.ones(32, 2) for layer in range(2)}
    assemble(experts, None, routers, tmp_path / "moe", top_k=1, max_shard_bytes=10**9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "moe")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    own = AutoModelForCausalLM.from_pretrained(experts["a"]).generation_config.eos_token_id
    assert end != own
    said = model.generate(
        torch.tensor([[5, 6]]), max_new_tokens=9, sequence_bias={(end,): 1e9}, do_sample=False
    )
    assert said[0].tolist() == [5, 6, end]
