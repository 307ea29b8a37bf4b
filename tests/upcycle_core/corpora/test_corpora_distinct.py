import hashlib
import re
import unicodedata

import numpy as np

from upcycle_core.corpora.distinct import (
    Document,
    apart_key,
    content_key,
    likeness,
    mostly_new,
)
from upcycle_core.corpora.seeded import permutation


def test_case_punctuation_and_space_do_not_make_a_document_new():
    assert content_key("Hello,\n  World_1!") == content_key("hello world 1")
    assert content_key("Hello, World 1") != content_key("hello world 2")
    assert content_key("naïve 中文") != content_key("nave")


def test_vowel_signs_tell_words_apart():
    for one, other in (("काम", "कम"), ("किला", "कला"), ("มา", "มี"), ("ปู่", "ปู้")):
        assert content_key(one) != content_key(other)
    assert content_key("काम, कम!") == content_key("काम  कम")


def test_a_letter_and_its_mark_may_be_one_character_or_two():
    for text in ("Tiếng Việt là ngôn ngữ", "한국어는 대한민국의", "Grüße, İstanbul"):
        one, two = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
        assert one != two
        assert content_key(one) == content_key(two)
        assert apart_key(one) == apart_key(two) == likeness(one)


def test_text_without_letters_is_what_it_is():
    assert content_key("+-*/ ( )") != content_key("<=> { }")
    assert content_key("---\n") == content_key("---\n")


def test_text_without_marks_has_the_key_that_it_always_had():
    """Splits of a model that lives hang on it."""
    for text in ("Hello, World_1!", "Grüße, ДОМ_中文 №5", "İstanbul İ.", "ok ❤\ufe0f 1\ufe0f"):
        former = re.sub(r"[\W_]+", "", text.lower())
        assert content_key(text) == hashlib.sha256(former.encode()).digest()[:16]


def test_what_documents_are_drawn_by_is_what_it_always_was():
    """What a living model is judged on hangs on it."""
    drawn = {"काम, कम!": "कमकम", "cafe\u0301": "cafe", "+-*/": "+-*/", "Oh, World_1!": "ohworld1"}
    for text, letters in drawn.items():
        assert likeness(text) == hashlib.sha256(letters.encode()).digest()[:16]


def test_documents_that_mostly_repeat_earlier_lines_are_left_out():
    licence = "Permission is hereby granted to any person\nThe software is provided as it is now\n"
    first = Document(licence + "a body of its own with many letters in it\n", "a")
    copy = Document(first.text.upper().replace(" ", "  "), "b")
    stub = Document(licence + "import something_small", "c")
    other = Document(
        licence + "\n".join(f"quite another line, the {n}th of its kind" for n in range(9)), "d"
    )
    short = Document("x = 1\ny = 2", "e")
    kept = list(mostly_new([first, copy, stub, other, short, short]))
    assert [document.file for document in kept] == ["a", "d", "e", "e"]


def test_permutation_depends_on_its_key_alone():
    first = permutation(50, 7, "order")
    assert sorted(first.tolist()) == list(range(50))
    assert np.array_equal(first, permutation(50, 7, "order"))
    assert not np.array_equal(first, permutation(50, 8, "order"))
    assert not np.array_equal(first, permutation(50, 7, "other"))
    assert permutation(5, 0, "fixed").tolist() == [4, 3, 1, 2, 0]  # in every process
