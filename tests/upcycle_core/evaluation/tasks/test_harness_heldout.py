import itertools
import math
import random
import re
import unicodedata
from collections import Counter

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.config import HeldoutKind
from upcycle_core.evaluation.tasks.heldout import heldout_items

SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo")
KINDS: tuple[HeldoutKind, ...] = ("continuation", "last_word", "text")


def document(seed: int, length: int = 6000) -> str:
    """Words of a small vocabulary of its own, so that they come back; lines of several lengths."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(80)]
    text = ""
    while len(text) < length:
        text += draw.choice(words) + draw.choice([" ", " ", " ", " ", "\n", ", ", "\n\n    "])
    return text


TEXTS = [document(seed) for seed in range(12)]


def place(item: dict) -> tuple[int, int]:
    index, start = map(int, item["id"].split("-"))
    return index, start


def test_the_true_continuation_follows_the_passage():
    items = heldout_items(TEXTS, kind="continuation", count=40, seed=0)
    assert len(items) == 40
    for item in items:
        index, start = place(item)
        whole = item["prompt"] + item["choices"][item["answer"]]
        assert TEXTS[index].startswith(whole, start)
        assert 240 <= len(item["prompt"]) <= 300


def test_wrong_continuations_come_from_other_documents():
    for item in heldout_items(TEXTS, kind="continuation", count=40, seed=0):
        index, _ = place(item)
        assert len(set(item["choices"])) == 4
        for number, choice in enumerate(item["choices"]):
            assert len(choice) == 60
            sources = [i for i, text in enumerate(TEXTS) if choice in text]
            assert (sources == [index]) == (number == item["answer"])


def test_passages_are_cut_between_words():
    for item in heldout_items(TEXTS, kind="continuation", count=40, seed=0):
        index, start = place(item)
        assert start == 0 or TEXTS[index][start - 1].isspace()
        assert not item["prompt"][0].isspace()
        assert not item["prompt"][-1].isspace()
        assert all(choice[0].isspace() for choice in item["choices"])


def test_right_choices_stand_anywhere():
    items = heldout_items(TEXTS, kind="continuation", count=80, seed=0)
    places = Counter(item["answer"] for item in items)
    # Each is expected 20 times; 8 is more than three deviations (3.9) away.
    assert sorted(places) == [0, 1, 2, 3]
    assert min(places.values()) > 8


def test_rules_and_numbers_are_no_continuation():
    draw = random.Random(0)
    tables = [" ".join(str(draw.randint(0, 9999)) for _ in range(400)) for _ in range(8)]
    for texts in (tables, ["words " * 50 + table for table in tables]):
        with pytest.raises(InputError, match="gives 0 items"):
            heldout_items(texts, kind="continuation", count=1, seed=0)


def test_a_lone_document_has_no_wrong_continuations():
    with pytest.raises(InputError, match="gives 0 items"):
        heldout_items(TEXTS[:1], kind="continuation", count=1, seed=0)


def test_the_last_word_follows_the_passage_and_occurred_in_it():
    items = heldout_items(TEXTS, kind="last_word", count=40, seed=0)
    assert len(items) == 40
    for item in items:
        index, start = place(item)
        text = TEXTS[index]
        assert text.startswith(f"{item['prompt']} {item['answer']}", start)
        after = text[start + len(item["prompt"]) + 1 :]
        assert re.split(r"\W", after)[0] == item["answer"]
        assert item["answer"] in re.split(r"\W+", item["prompt"])
        assert 3 <= len(item["answer"]) <= 16
        assert 240 <= len(item["prompt"]) <= 300
        assert start == 0 or text[start - 1].isspace()


ONCE = ["".join(letters) for letters in itertools.product("abcdefg", repeat=4)]


HINDI = ["सरकार", "शिक्षा", "पहली", "किताबें", "दुनिया", "विद्यालय"]


def test_vowel_signs_are_letters():
    draw = random.Random(0)
    text = " ".join(draw.choices(HINDI, k=400))
    items = heldout_items([text], kind="last_word", count=5, seed=0)
    assert {item["answer"] for item in items} <= {*HINDI}
    decomposed = unicodedata.normalize("NFD", text.replace("पहली", "naïveté"))
    found = heldout_items([decomposed], kind="last_word", count=7, seed=1)
    assert {item["answer"] for item in found} <= {*HINDI, unicodedata.normalize("NFD", "naïveté")}


def test_marks_of_symbols_are_no_letters():
    """Items of a text with emojis are those that they ever were."""
    text = " ".join(["\u2764\ufe0faab", *ONCE[:54], "aab\ufe0f"])
    (item,) = heldout_items([text], kind="last_word", count=1, seed=0)
    assert item["answer"] == "aab"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("continuation", "needs words set apart by blanks, and here are few; use kind 'text'"),
        ("last_word", "needs words set apart by blanks, and here are few; use kind 'text'"),
        ("text", "is cut at blanks and line breaks, and here are few; break lines"),
    ],
)
def test_text_without_blanks_is_told(kind, says):
    chinese = "河水又一次漫过草地和通往磨坊的路。" * 300
    with pytest.raises(InputError, match=f"gives 0 items of kind '{kind}', which {says}"):
        heldout_items([chinese] * 3, kind=kind, count=1, seed=0)
    with pytest.raises(InputError, match="ask for fewer, or give more or longer documents"):
        heldout_items(["Once more the river rose."], kind=kind, count=1, seed=0)
    lines = [f"{index}{chinese[:500]}\n" * 8 for index in range(3)]
    assert len(heldout_items(lines, kind="text", count=3, seed=0)) == 3


def test_words_that_come_once_are_not_asked_for():
    with pytest.raises(InputError, match="gives 0 items"):
        heldout_items([" ".join(ONCE)], kind="last_word", count=1, seed=0)


def test_a_part_of_a_word_is_no_occurrence():
    text = " ".join([*ONCE[:60], "aab"])  # "aab" begins a word of the passage, and is none
    with pytest.raises(InputError, match="gives 0 items"):
        heldout_items([text], kind="last_word", count=1, seed=0)
    (item,) = heldout_items([text.replace("aaab", "aab.")], kind="last_word", count=1, seed=0)
    assert item["answer"] == "aab"


def test_the_beginning_of_a_long_word_is_not_asked_for():
    text = " ".join(["abcdefghijklmnop", *ONCE[:50], "abcdefghijklmnopq"])
    with pytest.raises(InputError, match="gives 0 items"):
        heldout_items([text], kind="last_word", count=1, seed=0)
    assert heldout_items([text[:-1]], kind="last_word", count=1, seed=0)


def test_texts_are_passages_of_whole_words():
    items = heldout_items(TEXTS, kind="text", count=36, seed=0)
    for item in items:
        index, start = place(item)
        text, end = TEXTS[index], start + len(item["text"])
        assert text[start:end] == item["text"]
        assert 200 <= len(item["text"]) <= 2000
        assert start == 0 or text[start - 1].isspace()
        assert end == len(text) or text[end].isspace()


@pytest.mark.parametrize("kind", KINDS)
def test_passages_of_a_document_do_not_overlap(kind):
    most = {"continuation": 12 * 15, "last_word": 12 * 10, "text": 36}[kind]
    taken: dict[int, list[tuple[int, int]]] = {}
    for item in heldout_items(TEXTS, kind=kind, count=most, seed=0):
        index, start = place(item)
        length = len(item["text"] if kind == "text" else item["prompt"])
        taken.setdefault(index, []).append((start, start + length))
    for spans in taken.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert end <= start


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [5, 12, 30])
def test_documents_give_in_turn(kind, count):
    items = heldout_items(TEXTS, kind=kind, count=count, seed=0)
    given = Counter(place(item)[0] for item in items)
    assert max(given.values()) == math.ceil(count / 12)
    assert len(given) == min(count, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_alone_decides(kind):
    first = heldout_items(TEXTS, kind=kind, count=10, seed=0)
    assert heldout_items(iter(TEXTS), kind=kind, count=10, seed=0) == first
    # One item of each document: the seed decides which, not the order of documents alone.
    zero, one = (heldout_items(TEXTS, kind=kind, count=12, seed=seed) for seed in (0, 1))
    assert {item["id"] for item in zero} != {item["id"] for item in one}
    assert [place(item)[0] for item in zero] != [place(item)[0] for item in one]


@pytest.mark.parametrize("kind", KINDS)
def test_more_items_begin_with_the_same(kind):
    few, many = (heldout_items(TEXTS, kind=kind, count=n, seed=0) for n in (5, 20))
    keys = [key for key in few[0] if key != "choices" and key != "answer"]
    assert [[item[key] for key in keys] for item in many[:5]] == [
        [item[key] for key in keys] for item in few
    ]


def test_short_documents_are_passed_over():
    texts = ["too short", "", *TEXTS[:4], "also too short " * 5]
    for kind in KINDS:
        items = heldout_items(texts, kind=kind, count=4, seed=0)
        assert {place(item)[0] for item in items} == {2, 3, 4, 5}


def test_the_same_passage_is_asked_once():
    short = document(20, length=400)
    for kind in ("last_word", "text"):
        assert len(heldout_items([short] * 5, kind=kind, count=1, seed=0)) == 1
        with pytest.raises(InputError, match="gives 1 items"):
            heldout_items([short] * 5, kind=kind, count=2, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_items_are_an_error_that_says_how_many_there_are(kind):
    with pytest.raises(InputError) as caught:
        heldout_items(TEXTS[:4], kind=kind, count=10_000, seed=0)
    (fault,) = caught.value.faults
    (found,) = map(int, re.findall(r"gives (\d+) items", fault.remedy))
    assert (fault.field, fault.value) == ("items", 10_000)
    assert len(heldout_items(TEXTS[:4], kind=kind, count=found, seed=0)) == found
    with pytest.raises(InputError):
        heldout_items(TEXTS[:4], kind=kind, count=found + 1, seed=0)
