"""Generated tasks: every answer found a second way, and a few by hand."""

import re
from collections import Counter
from random import Random

import pytest

from upcycle_core.corpora.families.catalogue import FAMILIES, UNSEEN, generate
from upcycle_core.corpora.families.family import Family, Instance, draw_instances

COUNT = 1500
TABLE = "list = 4, type = 7, key = 0"
# Worked out by hand; each holds what is easily done wrong.
BY_HAND = {
    "last_letter": [({"letters": "b a k"}, "k")],
    "capital_letter": [({"letters": "b K d"}, "K")],
    "reverse_letters": [({"letters": "b a k m"}, "m k a b")],
    "vowel": [({"letters": "b k o m"}, "o"), ({"letters": "u c d"}, "u")],
    "give_letter": [({"items": "7 list k"}, "k"), ({"items": "a set 3"}, "a")],
    "give_number": [({"items": "7 list k"}, "7")],
    "give_word": [({"items": "7 list k"}, "list")],
    "has_letter": [({"items": "7 list k"}, "yes"), ({"items": "7 list 4"}, "no")],
    "has_number": [({"items": "7 list k"}, "yes"), ({"items": "b list k"}, "no")],
    "has_word": [({"items": "7 list k"}, "yes"), ({"items": "7 b k"}, "no")],
    "count_letters": [({"items": "7 list k k a"}, "3"), ({"items": "7 list 4"}, "0")],
    "count_numbers": [({"items": "7 7 list k 1"}, "3")],
    "count_words": [({"items": "7 list k list"}, "2")],
    "sign": [({"sum": "12 * 3"}, "times"), ({"sum": "0 / 7"}, "over")],
    "add_two_numbers": [
        ({"first": "17", "second": "25"}, "42"),
        ({"first": "20", "second": "11"}, "31"),
    ],
    "even_number": [({"numbers": "3 0 5"}, "0"), ({"numbers": "9 1 8"}, "8")],
    "largest": [({"numbers": "3 0 9 5"}, "9"), ({"numbers": "1 0 2"}, "2")],
    "sort_numbers": [({"numbers": "9 0 4 3"}, "0 3 4 9")],
    "is_more": [
        ({"first": "9", "second": "10"}, "no"),
        ({"first": "70", "second": "8"}, "yes"),
    ],
    "number_of_word": [({"key": "type", "table": TABLE}, "7")],
    "word_of_number": [({"value": "4", "table": TABLE}, "list")],
    "letter_of_word": [({"key": "set", "table": "text = b, set = e"}, "e")],
    "word_of_letter": [({"value": "e", "table": "text = b, set = e"}, "set")],
    "next_day": [({"days": "sun mon sat"}, "mon tue sun")],
    "has_weekend": [({"days": "mon sun"}, "yes"), ({"days": "mon fri thu"}, "no")],
    "day_of_week": [({"words": "set sun line"}, "sun")],
    "month_of_date": [({"date": "3 mar 1999"}, "mar")],
}


def test_there_are_families_of_several_domains_and_relatives_of_the_unseen():
    domains = Counter(family.domain for name, family in FAMILIES.items() if name not in UNSEEN)
    assert len(FAMILIES) - len(UNSEEN) >= 15
    assert len(domains) >= 4
    assert len(UNSEEN) == 3
    assert all(domains[FAMILIES[name].domain] >= 2 for name in UNSEEN)
    assert set(BY_HAND) == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_answers_of_a_family_are_right(name):
    family = FAMILIES[name]
    for given, answer in BY_HAND[name]:
        assert family.solve(given) == answer
    drawn = draw_instances(family, COUNT, Random(5))
    assert len(drawn) == COUNT
    assert [one.answer for _, one in drawn] == [family.solve(one.given) for _, one in drawn]
    # No question twice, though it might be put in other words.
    assert len({tuple(one.given.values()) for _, one in drawn}) == COUNT
    assert all(text in prompt for prompt, one in drawn for text in one.given.values())
    assert max(Counter(one.answer for _, one in drawn).values()) < 0.6 * COUNT


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_prompts_are_short_and_say_the_same_in_other_words(name):
    records = generate(name, 300, seed=1)
    pieces = [re.findall(r"\w+|[^\w\s]", record["prompt"]) for record in records]
    assert max(map(len, pieces)) <= 24  # no token of a small vocabulary is longer than a word
    assert max(len(record["response"].split()) for record in records) <= 4
    family = FAMILIES[name]
    used = Counter(
        phrasing
        for prompt, one in draw_instances(family, 300, Random(1))
        for phrasing in family.phrasings
        if phrasing.format(**one.given) == prompt
    )
    assert len(used) == len(family.phrasings) >= 2
    assert min(used.values()) > 90


def test_records_have_the_fields_of_prepared_lines():
    records = generate("largest", 4, seed=0)
    assert [record["id"] for record in records] == [f"largest-{i:05d}" for i in range(4)]
    for record in records:
        assert record["task"] == record["category"] == "largest"
        assert record["domain"] == "arithmetic"
        assert record["references"] == [record["response"]]


def test_what_is_generated_depends_on_family_and_seed_alone():
    records = generate("give_word", 50, seed=3)
    assert generate("give_word", 50, seed=3) == records
    assert generate("give_word", 20, seed=3) == records[:20]
    others = {record["prompt"] for record in generate("give_word", 50, seed=4)}
    assert len(others & {record["prompt"] for record in records}) < 10


def made(*, answer):
    return Family(
        domain="lists",
        phrasings=("What is {number}?",),
        draw=lambda rng: Instance({"number": str(rng.randrange(12))}, answer),
        solve=lambda given: "so",
    )


def test_a_family_with_few_questions_gives_each_once():
    drawn = draw_instances(made(answer="so"), 40, Random(0))
    assert sorted(prompt for prompt, _ in drawn) == sorted(f"What is {i}?" for i in range(12))


def test_an_answer_that_the_second_way_denies_is_an_error():
    with pytest.raises(RuntimeError, match=r"answer='no'.*contradicts 'so'"):
        draw_instances(made(answer="no"), 1, Random(0))
