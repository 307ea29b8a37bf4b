import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.pico import save_pico_tokenizer
from upcycle_core.checkpoints.tokenizer import (
    check_tokenizer,
    copy_tokenizer,
    vocabulary_fingerprint,
)
from upcycle_core.errors import InputError


def edit(source: Path, out: Path, change) -> Path:
    copy_tokenizer(source, out)
    core = json.loads((out / "tokenizer.json").read_text())
    change(core)
    (out / "tokenizer.json").write_text(json.dumps(core))
    return out


def test_swapped_ids_of_a_vocabulary_of_the_same_size_are_seen(tmp_path):
    one = save_pico_tokenizer(tmp_path / "one")

    def swap(core):
        vocabulary = core["model"]["vocab"]
        vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]

    two = edit(one, tmp_path / "two", swap)
    assert vocabulary_fingerprint(one) != vocabulary_fingerprint(two)


def test_added_tokens_and_merges_count(tmp_path):
    one = save_pico_tokenizer(tmp_path / "one")
    added = {"id": 96, "content": "<|new|>", "special": True}
    two = edit(one, tmp_path / "two", lambda core: core["added_tokens"].append(added))
    merged = edit(one, tmp_path / "m1", lambda core: core["model"].update(merges=["a b"]))
    other = edit(one, tmp_path / "m2", lambda core: core["model"].update(merges=["b a"]))
    newer = edit(one, tmp_path / "m3", lambda core: core["model"].update(merges=[["a", "b"]]))
    prints = [vocabulary_fingerprint(d) for d in (one, two, merged, other)]
    assert len(set(prints)) == 4
    assert vocabulary_fingerprint(newer) == vocabulary_fingerprint(merged)


def test_order_and_layout_of_the_file_do_not_count(tmp_path):
    one = save_pico_tokenizer(tmp_path / "one")

    def reverse(core):
        core["model"]["vocab"] = dict(reversed(core["model"]["vocab"].items()))
        core["padding"] = None

    assert vocabulary_fingerprint(edit(one, tmp_path / "two", reverse)) == vocabulary_fingerprint(
        one
    )


def test_a_copied_tokenizer_encodes_the_same(tmp_path):
    one = save_pico_tokenizer(tmp_path / "one")
    (one / "model.safetensors").write_bytes(b"not a tokenizer")
    copy_tokenizer(one, tmp_path / "two")
    ids = [
        AutoTokenizer.from_pretrained(d)("HELLO you")["input_ids"] for d in (one, tmp_path / "two")
    ]
    assert ids[0] == ids[1]
    assert not (tmp_path / "two" / "model.safetensors").exists()


def test_templates_that_are_asked_for_by_name_are_copied(tmp_path):
    one = save_pico_tokenizer(tmp_path / "one")
    tokenizer = AutoTokenizer.from_pretrained(one)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(one)
    assert (one / "additional_chat_templates" / "tool_use.jinja").is_file()
    copy_tokenizer(one, tmp_path / "two")
    copied = AutoTokenizer.from_pretrained(tmp_path / "two")
    assert copied.chat_template == tokenizer.chat_template


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    for call in (vocabulary_fingerprint, lambda d: copy_tokenizer(d, tmp_path / "out")):
        with pytest.raises(InputError, match="holds no tokenizer"):
            call(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        vocabulary_fingerprint(tmp_path)


@pytest.mark.parametrize(
    "text", ["{}", '{"model": {}}', "[]", '{"model": {"vocab": null}}', "null"]
)
def test_a_file_that_is_only_shaped_like_a_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        vocabulary_fingerprint(tmp_path)


def test_a_tokenizer_that_needs_code_of_the_checkpoint_is_refused(tmp_path):
    save_pico_tokenizer(tmp_path)
    check_tokenizer(tmp_path)
    evil = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(evil))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(InputError, match="cannot be read"):
        check_tokenizer(tmp_path)
