"""What a family of generated tasks is, and how its instances are drawn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

REPEATS = 2000
"""Draws in a row that bring nothing new, after which a family is held to have no more."""


Given = Mapping[str, str]
"""What a question is about, by the names that its phrasings have."""


class Instance(NamedTuple):
    """One question: what the phrasing is filled with, and the right answer."""

    given: Given
    answer: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """Questions of one kind with known answers.

    Letters, numbers and words stand apart by spaces, so that a tokenizer of any text keeps them
    apart, and a small model need not spell.

    Args:
        domain: What kinds of families are gathered under.
        phrasings: The instruction in several words, with a ``{name}`` for each part of ``given``.
        draw: Draws an instance.
        solve: The answer again, from the texts that stand in the prompt alone, found another way.
    """

    domain: str
    phrasings: tuple[str, ...]
    draw: Callable[[Random], Instance]
    solve: Callable[[Given], str]


def draw_instances(family: Family, count: int, rng: Random) -> list[tuple[str, Instance]]:
    """Up to ``count`` prompts and their instances; no question twice, in whatever phrasing.

    Args:
        family: What is drawn from.
        count: Instances wanted. A family that has fewer gives about as many as it has.
        rng: Decides which, their order and phrasings.

    Returns:
        Prompts with their instances.

    Raises:
        RuntimeError: The family's two ways to an answer disagree: its code is wrong.
    """
    found: dict[tuple[str, ...], tuple[str, Instance]] = {}
    repeats = 0
    while len(found) < count and repeats < REPEATS:
        instance = family.draw(rng)
        key = tuple(instance.given.values())
        repeats = repeats + 1 if key in found else 0
        if key in found:
            continue
        if family.solve(instance.given) != instance.answer:
            raise RuntimeError(f"{instance} contradicts {family.solve(instance.given)!r}")
        found[key] = rng.choice(family.phrasings).format(**instance.given), instance
    return list(found.values())


def draw_words(rng: Random, words: str, count: int) -> list[str]:
    """``count`` different ones of ``words``."""
    return rng.sample(words.split(), count)
