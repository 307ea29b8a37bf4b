"""What the harness makes of tasks from held-out text."""

import json
import math
import sys
from typing import Any

import pytest

from upcycle_core.evaluation.tasks.heldout import heldout_definition, heldout_items

CODE = "".join(
    f"def name_{i % 7}(value):\n    return value + name_{i % 5} + {i}\n\n" for i in range(80)
)
PROSE = "Once more the river rose over the meadow and over the road to the mill. " * 60
LETTER = "Dear friend, the letter that you sent came late, but the letter did come at last. " * 60
NOTES = (
    "Take two eggs, add flour and milk, then stir the flour and wait until the milk is hot. " * 60
)
TEXTS = [CODE, PROSE, LETTER, NOTES]


def evaluated(model: Any, kind: Any, rows: list[dict[str, Any]], tmp_path) -> dict[str, float]:
    from lm_eval import evaluate
    from lm_eval.tasks import TaskManager

    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        **heldout_definition(kind, rows),
        "task": kind,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": [str(path)]},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
    }
    task = TaskManager(include_defaults=False).load([config])
    return evaluate(model, task, bootstrap_iters=0)["results"][kind]


@pytest.fixture
def reader():
    """A model that knows the documents by heart, and writes three bits a byte."""
    from lm_eval.api.model import LM

    class Reader(LM):
        asked: list[Any]

        def loglikelihood(self, requests):
            self.asked = [request.args for request in requests]
            return [(0.0 if known(*args) else -1.0, False) for args in self.asked]

        def loglikelihood_rolling(self, requests):
            self.asked = [request.args for request in requests]
            return [-3 * math.log(2) * len(text.encode()) for (text,) in self.asked]

        def generate_until(self, requests):
            self.asked = [request.args for request in requests]
            return [written(*args) for args in self.asked]

    return Reader()


def known(context: str, continuation: str) -> bool:
    return any(context + continuation in text for text in TEXTS)


def rest(context: str) -> str:
    (text,) = (text for text in TEXTS if context in text)
    return text[text.index(context) + len(context) :]


def written(context: str, settings: dict[str, Any]) -> str:
    """The text as a tokenizer of bytes has it: a token each, or four letters of ASCII."""
    text, size = rest(context), settings["max_gen_toks"]
    return text[: 4 * size] if text.isascii() else text.encode()[:size].decode(errors="ignore")


def test_who_knows_the_text_chooses_right(reader, tmp_path):
    rows = heldout_items(TEXTS, kind="continuation", count=4, seed=0)
    found = evaluated(reader, "continuation", rows, tmp_path)
    assert found["acc,none"] == 1.0
    assert found["acc_norm,none"] == 1.0
    assert len(reader.asked) == 16
    assert reader.asked[:4] == [(rows[0]["prompt"], choice) for choice in rows[0]["choices"]]


def test_passages_that_look_like_numbers_are_asked_as_text(reader, tmp_path):
    """A template's result of digits would be an index, one in brackets a list."""
    rows = [
        {"id": "0", "prompt": "7", "choices": [" a", " b", " c", " d"], "answer": 0},
        {"id": "1", "prompt": "[1, 2]", "choices": [" a", " b", " c", " d"], "answer": 1},
    ]
    evaluated(reader, "continuation", rows, tmp_path)
    assert reader.asked[0] == ("7", " a")
    assert reader.asked[4] == ("[1, 2]", " a")


def test_the_first_word_of_an_answer_counts(reader, tmp_path):
    rows = heldout_items(TEXTS, kind="last_word", count=4, seed=0)
    assert evaluated(reader, "last_word", rows, tmp_path)["exact_match,first-word"] == 1.0
    assert [context for context, _ in reader.asked] == [row["prompt"] for row in rows]
    assert all(not context[-1].isspace() for context, _ in reader.asked)
    wrong = [{**row, "answer": row["answer"] + "x"} for row in rows[:1]] + rows[1:]
    assert evaluated(reader, "last_word", wrong, tmp_path)["exact_match,first-word"] == 0.75


@pytest.mark.parametrize("word", ["правительство", "대한민국", "naïveté", "विद्यालय"])
def test_no_right_word_is_cut_where_each_of_its_bytes_is_a_token(
    reader, tmp_path, monkeypatch, word
):
    text = f"{word} " + "и все были дома, " * 16 + f"{word} "
    rows = [{"id": "0", "prompt": text.rsplit(" ", 2)[0], "answer": word}]
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", [text])
    assert evaluated(reader, "last_word", rows, tmp_path)["exact_match,first-word"] == 1.0


@pytest.mark.parametrize("words", [["letter"], ["a" * 16, "b" * 3], ["café", "straightforward"]])
def test_words_of_ascii_are_asked_as_they_ever_were(words):
    """Scores that a recipe has hang on the definition."""
    rows = [{"id": word, "prompt": "Once", "answer": word} for word in words]
    found = heldout_definition("last_word", rows)
    asked = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    assert found["generation_kwargs"] == asked
    (by,) = found["filter_list"]
    assert by["filter"][0]["regex_pattern"] == r"^\s*(\w+)"


def test_a_word_that_goes_on_with_a_vowel_sign_is_another(reader, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", ["समय समया", "पहली पहली"])
    rows = [{"id": word, "prompt": word, "answer": word} for word in ("समय", "पहली")]
    assert evaluated(reader, "last_word", rows, tmp_path)["exact_match,first-word"] == 0.5


def test_likelihood_is_per_byte_of_the_text(reader, tmp_path):
    rows = heldout_items(TEXTS, kind="text", count=4, seed=0)
    rows.append({"id": "list", "text": "[" + ", ".join(["'é'"] * 60) + "]"})
    found = evaluated(reader, "text", rows, tmp_path)
    assert reader.asked == [(row["text"],) for row in rows]
    # Sums of a few thousand nats in double precision.
    assert found["bits_per_byte,none"] == pytest.approx(3.0, abs=1e-9)
    assert found["byte_perplexity,none"] == pytest.approx(8.0, abs=1e-8)
