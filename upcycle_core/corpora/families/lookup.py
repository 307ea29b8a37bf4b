"""Families about small tables that stand in the prompt."""

import re
from collections.abc import Callable
from random import Random

from upcycle_core.corpora.families.family import Family, Given, Instance, draw_words
from upcycle_core.corpora.families.words import DIGITS, LETTERS, WORDS


def _table(keys: list[str], values: list[str]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True))


def _drawn(rng: Random, words: str) -> tuple[list[str], list[str], int]:
    """Keys, their values, and the row that is asked for."""
    rows = rng.randint(3, 4)
    return draw_words(rng, WORDS, rows), draw_words(rng, words, rows), rng.randrange(rows)


def _draw_value(values: str) -> Callable[[Random], Instance]:
    def draw(rng: Random) -> Instance:
        keys, found, row = _drawn(rng, values)
        return Instance({"key": keys[row], "table": _table(keys, found)}, found[row])

    return draw


def _draw_key(values: str) -> Callable[[Random], Instance]:
    def draw(rng: Random) -> Instance:
        keys, found, row = _drawn(rng, values)
        return Instance({"value": found[row], "table": _table(keys, found)}, keys[row])

    return draw


def _value(given: Given) -> str:
    found = re.search(rf"\b{given['key']} = (\w+)", given["table"])
    return found[1] if found else ""


def _key(given: Given) -> str:
    found = re.search(rf"(\w+) = {given['value']}\b", given["table"])
    return found[1] if found else ""


LOOKUP = {
    "number_of_word": Family(
        domain="lookup",
        phrasings=("Which number has {key}: {table}", "Give the number of {key}: {table}"),
        draw=_draw_value(DIGITS),
        solve=_value,
    ),
    "word_of_number": Family(
        domain="lookup",
        phrasings=("Which word has {value}: {table}", "Give the word of {value}: {table}"),
        draw=_draw_key(DIGITS),
        solve=_key,
    ),
    "letter_of_word": Family(
        domain="lookup",
        phrasings=("Which letter has {key}: {table}", "Give the letter of {key}: {table}"),
        draw=_draw_value(LETTERS),
        solve=_value,
    ),
    "word_of_letter": Family(
        domain="lookup",
        phrasings=("Which word has {value}: {table}", "Give the word of {value}: {table}"),
        draw=_draw_key(LETTERS),
        solve=_key,
    ),
}
