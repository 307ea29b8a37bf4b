"""Families about numbers."""

from random import Random

from upcycle_core.corpora.families.family import Family, Given, Instance, draw_words
from upcycle_core.corpora.families.words import DIGITS

SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "over"}


def _draw_add(rng: Random) -> Instance:
    first, second = rng.randint(10, 49), rng.randint(10, 49)
    return Instance({"first": str(first), "second": str(second)}, str(first + second))


def _draw_even(rng: Random) -> Instance:
    even = rng.choice("02468")
    digits = [*rng.choices("13579", k=rng.randint(3, 4)), even]
    rng.shuffle(digits)
    return Instance({"numbers": " ".join(digits)}, even)


def _draw_sign(rng: Random) -> Instance:
    sign, word = rng.choice(list(SIGNS.items()))
    return Instance({"sum": f"{rng.randint(0, 99)} {sign} {rng.randint(0, 99)}"}, word)


def _draw_largest(rng: Random) -> Instance:
    digits = draw_words(rng, DIGITS, rng.randint(3, 4))
    return Instance({"numbers": " ".join(digits)}, max(digits))


def _draw_sort(rng: Random) -> Instance:
    digits = draw_words(rng, DIGITS, rng.randint(3, 4))
    return Instance({"numbers": " ".join(digits)}, " ".join(sorted(digits)))


def _draw_more(rng: Random) -> Instance:
    first, second = rng.sample(range(100), 2)
    answer = "yes" if first > second else "no"
    return Instance({"first": str(first), "second": str(second)}, answer)


def _add(given: Given) -> str:
    """As on paper."""
    tens, ones = (int(given["first"][i]) + int(given["second"][i]) for i in (0, 1))
    return f"{tens + ones // 10}{ones % 10}"


def _even(given: Given) -> str:
    return next(digit for digit in given["numbers"].split() if int(digit) % 2 == 0)


def _largest(given: Given) -> str:
    return next(digit for digit in "9876543210" if digit in given["numbers"])


def _sort(given: Given) -> str:
    return " ".join(digit for digit in "0123456789" if digit in given["numbers"])


def _more(given: Given) -> str:
    return "yes" if int(given["first"]) - int(given["second"]) > 0 else "no"


ARITHMETIC = {
    "add_two_numbers": Family(
        domain="arithmetic",
        phrasings=("Add the numbers: {first} + {second}", "What is {first} + {second}"),
        draw=_draw_add,
        solve=_add,
    ),
    "even_number": Family(
        domain="arithmetic",
        phrasings=("Give the even number: {numbers}", "Which number is even: {numbers}"),
        draw=_draw_even,
        solve=_even,
    ),
    "largest": Family(
        domain="arithmetic",
        phrasings=("Give the largest number: {numbers}", "Which number is largest: {numbers}"),
        draw=_draw_largest,
        solve=_largest,
    ),
    "sort_numbers": Family(
        domain="arithmetic",
        phrasings=("Sort the numbers: {numbers}", "Put the numbers in order: {numbers}"),
        draw=_draw_sort,
        solve=_sort,
    ),
    "is_more": Family(
        domain="arithmetic",
        phrasings=("Is {first} more than {second}", "Is the first more: {first} and {second}"),
        draw=_draw_more,
        solve=_more,
    ),
    "sign": Family(
        domain="arithmetic",
        phrasings=("Name the sign: {sum}", "Which word is the sign: {sum}"),
        draw=_draw_sign,
        solve=lambda given: SIGNS[given["sum"].strip("0123456789 ")],
    ),
}
