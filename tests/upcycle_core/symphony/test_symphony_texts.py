"""Calibration text for two tokenizers, against ends of tokens counted byte by byte."""

from itertools import accumulate, combinations
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.vocabularies import (
    END,
    NATURE,
    TEXTS,
    byte_level,
    core_of,
    edited,
    shuffled,
    three_vocabularies,
    tokens_of,
)
from upcycle_core.errors import InputError
from upcycle_core.symphony.config import CalibrationConfig
from upcycle_core.symphony.texts import paired_texts

# sentencepiece's sign for a space is a space to it: its bytes could not be told from the token's
DOCUMENTS = [
    *(text.replace("▁", "_") for text in TEXTS),
    "the naïve cat – 中文 😀😀 " * 9,
    "e\u0301 " + NATURE,
]
ALL = CalibrationConfig(tokens=10**6, sequence_length=48, batch_size=3)


def write(path: Path, documents: list[str]) -> Path:
    parquet.write_table(pyarrow.table({"text": pyarrow.array(documents, pyarrow.string())}), path)
    return path


@pytest.fixture
def texts(tmp_path):
    """The same documents in two domains, twice as many in one."""
    return {
        "long": write(tmp_path / "long.parquet", DOCUMENTS * 2),
        "short": write(tmp_path / "short.parquet", DOCUMENTS),
    }


def ends(directory: Path, text: str) -> tuple[list[int], list[int]]:
    """Ids of a text, and how many of its bytes have been said after each."""
    core = core_of(directory)
    core.encode_special_tokens = True
    ids = core.encode(text, add_special_tokens=False).ids
    sizes = {id: len(token) for token, id in tokens_of(directory).items()}
    after = list(accumulate(sizes[id] for id in ids))
    if after and after[-1] > len(text.encode()):  # the space that sentencepiece puts before a text
        after = [end - 1 for end in after]
    return ids, after


def plain_pairs(first: Path, second: Path, text: str) -> list[tuple[int, int]]:
    """Ids of both models whose ends in the text coincide, at ends of characters."""
    characters = set(accumulate(len(character.encode()) for character in text))
    ours, theirs = ends(first, text), ends(second, text)
    return [
        (id, other)
        for id, end in zip(*ours, strict=True)
        for other, other_end in zip(*theirs, strict=True)
        if end == other_end and end in characters
    ]


def found_pairs(paired) -> list[tuple[int, int]]:
    return [
        (int(window.first[i]), int(window.second[j]))
        for window in paired.windows
        for i, j in window.places
    ]


@pytest.mark.parametrize(("one", "other"), [*combinations(range(3), 2), (2, 0)])
def test_tokens_are_paired_where_both_end_in_the_text(tmp_path, texts, one, other):
    directories = three_vocabularies(tmp_path)
    first, second = directories[one], directories[other]
    paired = paired_texts({"short": texts["short"]}, first, second, config=ALL)
    expected = [pair for text in DOCUMENTS for pair in plain_pairs(first, second, text)]
    assert found_pairs(paired) == expected
    assert paired.pairs == {"short": len(expected)}
    for k, directory in enumerate((first, second)):
        ids = [id for text in DOCUMENTS for id in ends(directory, text)[0]]
        assert [id for window in paired.windows for id in window[k]] == ids
        assert 8 < max(len(window[k]) for window in paired.windows) <= 48


def test_equal_tokens_under_other_ids_stand_opposite_each_other(tmp_path, texts):
    first = byte_level(tmp_path / "first", NATURE, merges=30)
    paired = paired_texts(texts, first, shuffled(first, tmp_path / "second"), config=ALL)
    by_bytes = [{i: b for b, i in tokens_of(tmp_path / n).items()} for n in ("first", "second")]
    pairs = found_pairs(paired)
    assert len(pairs) > 200
    assert all(by_bytes[0][i] == by_bytes[1][j] for i, j in pairs)


def test_one_vocabulary_is_paired_token_by_token(tmp_path, texts):
    first = byte_level(tmp_path / "first", NATURE, merges=30)
    second = byte_level(tmp_path / "second", NATURE, merges=30)
    paired = paired_texts(texts, first, second, config=ALL)
    assert paired.pairs == paired.tokens
    for window in paired.windows:
        assert np.array_equal(window.first, window.second)
        assert window.places.tolist() == [[i, i] for i in range(len(window.first))]
    assert max(len(window.first) for window in paired.windows) == 48


def test_what_a_tokenizer_does_after_cutting_moves_no_end(tmp_path, texts):
    """GPT-2's and Llama 3's tokenizers trim white space from offsets."""
    nature, mixed, _ = three_vocabularies(tmp_path)
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    trimming = edited(
        nature, tmp_path / "trimming", lambda core: core.update({"post_processor": step})
    )
    paired, expected = (paired_texts(texts, d, mixed, config=ALL) for d in (trimming, nature))
    assert found_pairs(paired) == found_pairs(expected)


def beginning(source: Path, out: Path) -> Path:
    """A tokenizer that puts its beginning-of-sequence token before a text."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokens_of(source)[END.encode()])]
    )
    tokenizer.save_pretrained(out)
    return out


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_beginning_token_stands_before_each_document_and_is_no_pair(tmp_path, bos, shared):
    plain, other, _ = three_vocabularies(tmp_path)
    first, second = beginning(plain, tmp_path / "begun"), plain if shared else other
    documents = write(tmp_path / "a.parquet", DOCUMENTS)
    paired = paired_texts({"a": documents}, first, second, config=ALL, bos=bos)
    expected = [pair for text in DOCUMENTS for pair in plain_pairs(plain, second, text)]
    if shared:  # every token, those within a character among them
        expected = [(id, id) for text in DOCUMENTS for id in ends(plain, text)[0]]
    assert found_pairs(paired) == expected
    for k, (directory, has_own) in enumerate(((plain, bos == "auto"), (second, False))):
        before = [tokens_of(directory)[END.encode()]] if has_own or bos == "always" else []
        read = [ends(directory, text)[0] for text in DOCUMENTS]
        wanted = [id for ids in read if ids for id in [*before, *ids]]
        assert [id for window in paired.windows for id in window[k].tolist()] == wanted
    assert max(max(map(len, window[:2])) for window in paired.windows) <= 48


def test_every_domain_gives_the_same_number_of_tokens(tmp_path, texts):
    first, second, _ = three_vocabularies(tmp_path)
    for tokens in (1, 50, 10**6):
        config = CalibrationConfig(tokens=tokens, sequence_length=48, batch_size=4)
        paired = paired_texts(texts, first, second, config=config)
        available = sum(len(ends(first, text)[0]) for text in DOCUMENTS)
        assert paired.tokens == dict.fromkeys(texts, min(tokens, available))
        assert sum(len(window.first) for window in paired.windows) == 2 * min(tokens, available)
        for window in paired.windows:
            assert bool((window.places < [len(window.first), len(window.second)]).all())
    assert paired.pairs["long"] == paired.pairs["short"]  # the same documents come first


def test_batches_hold_every_window_once_and_padding_is_in_no_row(tmp_path, texts):
    first, second, _ = three_vocabularies(tmp_path)
    paired = paired_texts(texts, first, second, config=ALL)
    seen, pairs, widths = [[], []], [], []
    for batch in paired.batches():
        sides = (
            (batch.first_ids, batch.first_mask, batch.first_rows),
            (batch.second_ids, batch.second_mask, batch.second_rows),
        )
        for k, (ids, mask, rows) in enumerate(sides):
            assert bool(mask.flatten()[rows].all())
            assert bool((rows.diff() > 0).all())
            assert not ids[~mask.bool()].any()
            seen[k] += [row[: int(n)].tolist() for row, n in zip(ids, mask.sum(1), strict=True)]
        rows = [ids.flatten()[rows].tolist() for ids, _, rows in sides]
        pairs += zip(*rows, strict=True)
        widths.append(max(batch.first_ids.shape[1], batch.second_ids.shape[1]))
    for k in (0, 1):
        assert sorted(seen[k]) == sorted(window[k].tolist() for window in paired.windows)
    assert sorted(pairs) == sorted(found_pairs(paired))
    assert widths == sorted(widths, reverse=True)
    again = paired_texts(texts, first, second, config=ALL).batches()
    for one, other in zip(paired.batches(), again, strict=True):
        assert all(torch.equal(t, vars(other)[name]) for name, t in vars(one).items())


def test_a_stretch_that_no_window_holds_is_left_out(tmp_path):
    """Twenty emojis are one token of one model and eighty of the other."""
    emojis = "😀" * 20
    first = byte_level(tmp_path / "first", NATURE, merges=1)
    second = byte_level(tmp_path / "second", (emojis + "\n") * 9, merges=60)
    text = NATURE + "\n" + emojis + "\n" + NATURE
    documents = write(tmp_path / "a.parquet", [text])
    assert len(plain_pairs(first, second, emojis)) == 1
    paired = paired_texts({"a": documents}, first, second, config=ALL)
    kept = [id for window in paired.windows for id in window.first]
    assert len(ends(first, text)[0]) - len(kept) == 80
    assert found_pairs(paired) == [p for p in plain_pairs(first, second, text) if p[1] in kept]


def test_names_of_special_tokens_stay_text(tmp_path):
    first = byte_level(tmp_path / "first", NATURE, merges=30)
    documents = write(tmp_path / "a.parquet", [f"the cat{END}"])
    paired = paired_texts({"a": documents}, first, first, config=ALL)
    assert tokens_of(first).get(END.encode(), -1) not in found_pairs(paired)[-1]
    assert paired.tokens["a"] == len(ends(first, f"the cat{END}")[0]) > 3


def test_domains_without_text_are_named_together(tmp_path, texts):
    first = byte_level(tmp_path / "first", NATURE, merges=30)
    texts |= {"law": write(tmp_path / "e.parquet", []), "med": write(tmp_path / "f.parquet", [""])}
    with pytest.raises(InputError) as caught:
        paired_texts(texts, first, first, config=ALL)
    fields = [fault.field for fault in caught.value.faults]
    assert fields == ["calibration.domains.law", "calibration.domains.med"]
