"""Families about lists of letters, numbers and words: which one, is there one, how many."""

import re
from collections.abc import Callable
from random import Random
from typing import Literal

from upcycle_core.corpora.families.family import Family, Given, Instance
from upcycle_core.corpora.families.words import DIGITS, LETTERS, WORDS

Kind = Literal["letter", "number", "word"]
KINDS: dict[Kind, str] = {"letter": LETTERS, "number": DIGITS, "word": WORDS}
PATTERNS: dict[Kind, str] = {
    "letter": r"\b[a-z]\b",
    "number": r"\b[0-9]\b",
    "word": r"\b[a-z]{2,}\b",
}


def _others(rng: Random, kind: Kind, count: int) -> list[str]:
    """Items of the other kinds."""
    pool = " ".join(items for other, items in KINDS.items() if other != kind).split()
    return rng.choices(pool, k=count)


def _draw_give(kind: Kind) -> Callable[[Random], Instance]:
    def draw(rng: Random) -> Instance:
        wanted = rng.choice(KINDS[kind].split())
        items = [wanted, *_others(rng, kind, rng.randint(2, 4))]
        rng.shuffle(items)
        return Instance({"items": " ".join(items)}, wanted)

    return draw


def _draw_has(kind: Kind) -> Callable[[Random], Instance]:
    def draw(rng: Random) -> Instance:
        is_there = rng.random() < 0.5
        items = _others(rng, kind, rng.randint(3, 5))
        if is_there:
            items[rng.randrange(len(items))] = rng.choice(KINDS[kind].split())
        return Instance({"items": " ".join(items)}, "yes" if is_there else "no")

    return draw


def _draw_count(kind: Kind) -> Callable[[Random], Instance]:
    def draw(rng: Random) -> Instance:
        count = rng.randint(0, 4)
        items = rng.choices(KINDS[kind].split(), k=count) + _others(rng, kind, 5 - count)
        rng.shuffle(items)
        return Instance({"items": " ".join(items)}, str(count))

    return draw


def _found(kind: Kind, given: Given) -> list[str]:
    return re.findall(PATTERNS[kind], given["items"])


def _give(kind: Kind) -> Family:
    return Family(
        domain="lists",
        phrasings=(f"Give the {kind}: {{items}}", f"Which one is a {kind}: {{items}}"),
        draw=_draw_give(kind),
        solve=lambda given: _found(kind, given)[0],
    )


def _has(kind: Kind) -> Family:
    return Family(
        domain="lists",
        phrasings=(f"Is there a {kind}: {{items}}", f"Does it have a {kind}: {{items}}"),
        draw=_draw_has(kind),
        solve=lambda given: "yes" if _found(kind, given) else "no",
    )


def _count(kind: Kind) -> Family:
    return Family(
        domain="lists",
        phrasings=(f"Count the {kind}s: {{items}}", f"How many {kind}s: {{items}}"),
        draw=_draw_count(kind),
        solve=lambda given: str(len(_found(kind, given))),
    )


LISTS = {
    "give_letter": _give("letter"),
    "give_number": _give("number"),
    "give_word": _give("word"),
    "has_letter": _has("letter"),
    "has_number": _has("number"),
    "has_word": _has("word"),
    "count_letters": _count("letter"),
    "count_numbers": _count("number"),
    "count_words": _count("word"),
}
