import itertools
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.pico import save_pico_tokenizer
from tests.vocabularies import (
    ACCENTS,
    CODE,
    NATURE,
    TEXTS,
    byte_level,
    core_of,
    edited,
    pieces,
    shuffled,
    three_vocabularies,
    tokens_of,
    unigram,
)
from upcycle_core.backbone.vocabulary import merge_rows, unite_vocabularies, write_union_tokenizer
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.errors import InputError


@pytest.fixture
def three(tmp_path) -> list[Path]:
    return three_vocabularies(tmp_path)


@pytest.mark.parametrize("ruling", [0, 1])
def test_tokens_are_the_same_if_their_bytes_are(three, ruling):
    union = unite_vocabularies(three, ruling=ruling)
    tables = [tokens_of(directory) for directory in three]
    texts = set().union(*tables)
    assert texts == set(union.tokens)
    for text in texts - {b"<|end|>", b"<|im|>", b"<s>"}:
        at = union.tokens.index(text)
        assert union.rows[:, at].tolist() == [table.get(text, -1) for table in tables], text
    shared = (union.rows >= 0).sum(dim=0)
    assert {1, 2, 3} == set(shared.tolist())
    # Each row of each model is used once.
    for row, directory in zip(union.rows, three, strict=True):
        size = core_of(directory).get_vocab_size()
        assert sorted(row[row >= 0].tolist()) == list(range(size))


def test_the_ruling_models_ids_stay_whatever_the_order_of_the_models(tmp_path, three):
    union = unite_vocabularies(three, ruling=1)
    base = core_of(three[1]).get_vocab_size()
    assert union.rows[1].tolist()[:base] == list(range(base))
    assert (union.rows[1, base:] == -1).all()
    write_union_tokenizer(union, tmp_path / "out")
    for order in itertools.permutations(range(3)):
        again = unite_vocabularies([three[i] for i in order], ruling=order.index(1))
        assert again.tokens == union.tokens
        assert torch.equal(again.rows, union.rows[list(order)])
        write_union_tokenizer(again, tmp_path / "again")
        assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "again")


def test_a_vocabulary_of_the_same_size_with_other_ids_is_matched_by_token(tmp_path):
    one = byte_level(tmp_path / "one", NATURE, merges=30)

    two = shuffled(one, tmp_path / "two")
    union = unite_vocabularies([one, two])  # the rules are the same: nobody need be chosen
    ids = [core_of(directory).get_vocab() for directory in (one, two)]
    assert len(union.tokens) == len(ids[0])
    for token, id in ids[0].items():
        assert union.rows[:, id].tolist() == [id, ids[1][token]]
    matrix = torch.randn(len(ids[0]), 4)
    other = torch.empty_like(matrix)
    other[union.rows[1]] = matrix
    assert torch.equal(merge_rows(union, [matrix, other]), matrix)


def test_differing_merges_need_a_ruler_and_the_first_that_differs_is_named(tmp_path, three):
    one = three[0]
    same = edited(one, tmp_path / "same", lambda core: None)

    def swap(core):
        merges = core["model"]["merges"]
        merges[4], merges[5] = merges[5], merges[4]

    two = edited(one, tmp_path / "two", swap)
    short = edited(one, tmp_path / "short", lambda core: core["model"]["merges"].pop())
    first = json.loads((one / "tokenizer.json").read_text())["model"]["merges"]
    with pytest.raises(InputError) as error:
        unite_vocabularies([one, same, two, short, three[2]])
    faults = [str(fault) for fault in error.value.faults]
    assert len(faults) == 3
    assert faults[0].startswith("models[2].tokenizer = ")
    spelled = [" + ".join(map(repr, first[i])) for i in (5, 4)]
    assert f"merges[4] is {spelled[0]} here and {spelled[1]} there" in faults[0]
    assert f"merges[{len(first) - 1}] is None here and {first[-1][0]!r}" in faults[1]
    assert faults[2].startswith("models[4].tokenizer")
    assert "model[1] is 'pieces' here and 'bytes' there" in faults[2]
    with pytest.raises(InputError, match=r"ruling = 5: .*index below 3"):
        unite_vocabularies(three, ruling=5)


RULERS = {
    "bytes": lambda d: byte_level(d, NATURE, merges=30),
    "ignoring merges": lambda d: byte_level(d, NATURE, merges=30, ignore_merges=True),
    "pieces": lambda d: pieces(d, NATURE, merges=30),
    "unigram": lambda d: unigram(d, NATURE),
    "words": save_pico_tokenizer,
}


@pytest.mark.parametrize("ruler", RULERS)
def test_text_is_cut_as_the_ruling_model_cuts_it(tmp_path, ruler):
    """Also where an entry is looked up without a merge, or is one character."""
    ruling = RULERS[ruler](tmp_path / "ruler")
    others = [
        # No parts of characters: not every ruler can spell them.
        byte_level(tmp_path / "code", CODE + NATURE, merges=80, alphabet=False),
        pieces(tmp_path / "pieces", ACCENTS + CODE, merges=40, fallback=False),
    ]
    union = unite_vocabularies([others[0], ruling, others[1]], ruling=1)
    write_union_tokenizer(union, tmp_path / "out")
    before, after = core_of(ruling), core_of(tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    original = AutoTokenizer.from_pretrained(ruling)
    assert len(union.tokens) > before.get_vocab_size() + 10
    assert after.get_vocab_size() == len(union.tokens) == len(loaded)
    for text in TEXTS:
        assert after.encode(text).ids == before.encode(text).ids, text
        assert loaded(text)["input_ids"] == original(text)["input_ids"], text
        ids = before.encode(text).ids
        assert after.decode(ids) == before.decode(ids)


@pytest.mark.parametrize("ruler", ["bytes", "ignoring merges", "pieces", "unigram"])
def test_every_token_of_the_union_decodes_to_its_bytes(tmp_path, ruler):
    ruling = RULERS[ruler](tmp_path / "ruler")
    other = byte_level(tmp_path / "code", CODE + NATURE, merges=80, alphabet=False)
    third = pieces(tmp_path / "pieces", ACCENTS, merges=40, fallback=ruler != "unigram")
    union = unite_vocabularies([ruling, other, third], ruling=0)
    write_union_tokenizer(union, tmp_path / "out")
    after = core_of(tmp_path / "out")
    # A letter in front: sentencepiece's decoder takes the first space of a text away.
    letter = after.encode("t", add_special_tokens=False).ids
    start = after.decode(letter)
    checked = 0
    for id, text in enumerate(union.tokens):
        if text.isascii() or len(text) > 1:
            assert after.decode([*letter, id], skip_special_tokens=False) == start + text.decode()
            checked += 1
    assert checked >= len(union.tokens) - 128


def test_a_ruler_that_cannot_spell_a_token_is_refused(three):
    with pytest.raises(InputError, match=r"models\[2\]\.tokenizer = .*no way to spell \d+ tokens"):
        unite_vocabularies(three, ruling=2)


def test_what_cannot_be_read_is_listed_together(tmp_path):
    one = byte_level(tmp_path / "one", NATURE, merges=5)
    broken = edited(one, tmp_path / "broken", lambda core: core["model"].update(type="Other"))

    def no_bytes(core):
        keys = {"unk_token": "the", "max_input_chars_per_word": 9, "continuing_subword_prefix": "#"}
        core["model"] = {"type": "WordPiece", "vocab": core["model"]["vocab"], **keys}

    piece = edited(one, tmp_path / "piece", no_bytes)
    with pytest.raises(InputError) as error:
        unite_vocabularies([one, tmp_path / "none", broken, piece])
    said = [str(fault) for fault in error.value.faults]
    assert [fault.split(" = ")[0] for fault in said] == [
        f"models[{i}].tokenizer" for i in (1, 2, 3)
    ]
    assert "cannot be read" in said[0]
    assert "cannot be read" in said[1]
    assert "is WordPiece" in said[2]


@pytest.mark.parametrize(
    ("make", "name"),
    [(pieces, "LlamaTokenizer"), (byte_level, "Qwen2Tokenizer"), (byte_level, "GPT2Tokenizer")],
)
@pytest.mark.parametrize("prefix", [False, True])
def test_a_tokenizer_rules_as_its_file_says_whatever_its_class(tmp_path, make, name, prefix):
    ruling = make(tmp_path / "ruler", NATURE, merges=20)
    path = ruling / "tokenizer_config.json"
    settings = {"tokenizer_class": name, "add_prefix_space": prefix, "legacy": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    other = byte_level(tmp_path / "other", CODE, merges=20, alphabet=False, specials=["<|x|>"])
    union = unite_vocabularies([other, ruling], ruling=1)
    write_union_tokenizer(union, tmp_path / "out")
    before = Tokenizer.from_file(str(ruling / "tokenizer.json"))
    after = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert after(text)["input_ids"] == before.encode(text).ids, text


def test_the_written_tokenizer_is_the_rulers_without_older_forms(tmp_path, three):
    config = json.loads((three[1] / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.py", None]}
    (three[1] / "tokenizer_config.json").write_text(json.dumps(config))
    (three[1] / "vocab.json").write_text("{}")
    (three[1] / "merges.txt").write_text("")
    (three[1] / "chat_template.jinja").write_text("{{ messages }}")
    (three[1] / "additional_chat_templates").mkdir()
    (three[1] / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for name in ("out", "again"):
        write_union_tokenizer(unite_vocabularies(three, ruling=1), tmp_path / name)
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "again")
    assert not (tmp_path / "out" / "vocab.json").exists()
    assert not (tmp_path / "out" / "merges.txt").exists()
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "auto_map" not in written
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert loaded.eos_token == "<|end|>"
