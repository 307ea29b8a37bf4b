"""The embedded instruction tasks: families of generated questions with verified answers."""

from collections.abc import Mapping
from random import Random
from typing import Any

from upcycle_core.corpora.families.arithmetic import ARITHMETIC
from upcycle_core.corpora.families.calendar import CALENDAR
from upcycle_core.corpora.families.family import Family, draw_instances
from upcycle_core.corpora.families.lists import LISTS
from upcycle_core.corpora.families.lookup import LOOKUP
from upcycle_core.corpora.families.strings import STRINGS

FAMILIES: Mapping[str, Family] = {**STRINGS, **LISTS, **ARITHMETIC, **LOOKUP, **CALENDAR}
"""By name, which is the name of its task and its category."""
UNSEEN = ("give_number", "count_words", "word_of_number")
"""Held out of training by default. Each is put together of what others ask: give a letter and
count numbers, count letters and give a word, the word of a letter and the number of a word."""


def generate(family: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Instances of a family, each with another question.

    Args:
        family: One of ``FAMILIES``.
        count: Instances. A family that has fewer questions gives about as many as it has.
        seed: Decides them, with the family's name.

    Returns:
        Records ``{id, task, category, domain, prompt, response, references}``; task and category
        are the family's name.
    """
    known = FAMILIES[family]
    drawn = draw_instances(known, count, Random(repr((seed, "families", family))))
    return [
        {
            "id": f"{family}-{number:05d}",
            "task": family,
            "category": family,
            "domain": known.domain,
            "prompt": prompt,
            "response": instance.answer,
            "references": [instance.answer],
        }
        for number, (prompt, instance) in enumerate(drawn)
    ]
