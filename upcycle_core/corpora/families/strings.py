"""Families about letters."""

from random import Random

from upcycle_core.corpora.families.family import Family, Given, Instance, draw_words
from upcycle_core.corpora.families.words import CONSONANTS, LETTERS, VOWELS


def _letters(rng: Random) -> list[str]:
    return draw_words(rng, LETTERS, rng.randint(3, 4))


def _draw_last(rng: Random) -> Instance:
    letters = _letters(rng)
    return Instance({"letters": " ".join(letters)}, letters[-1])


def _draw_reverse(rng: Random) -> Instance:
    letters = _letters(rng)
    return Instance({"letters": " ".join(letters)}, " ".join(reversed(letters)))


def _draw_vowel(rng: Random) -> Instance:
    vowel = rng.choice(VOWELS.split())
    letters = [*draw_words(rng, CONSONANTS, rng.randint(3, 4)), vowel]
    rng.shuffle(letters)
    return Instance({"letters": " ".join(letters)}, vowel)


def _draw_capital(rng: Random) -> Instance:
    letters = draw_words(rng, CONSONANTS, rng.randint(3, 5))
    place = rng.randrange(len(letters))
    letters[place] = letters[place].upper()
    return Instance({"letters": " ".join(letters)}, letters[place])


def _vowel(given: Given) -> str:
    return given["letters"].translate(str.maketrans("", "", "bcdfghjklmnpqrstvwxyz "))


STRINGS = {
    "last_letter": Family(
        domain="strings",
        phrasings=("Give the last letter: {letters}", "Last letter of: {letters}"),
        draw=_draw_last,
        solve=lambda given: given["letters"].rpartition(" ")[2],
    ),
    "reverse_letters": Family(
        domain="strings",
        phrasings=("Reverse the letters: {letters}", "Write the letters backwards: {letters}"),
        draw=_draw_reverse,
        solve=lambda given: given["letters"][::-1],
    ),
    "vowel": Family(
        domain="strings",
        phrasings=("Give the vowel: {letters}", "Which letter is a vowel: {letters}"),
        draw=_draw_vowel,
        solve=_vowel,
    ),
    "capital_letter": Family(
        domain="strings",
        phrasings=("Give the capital letter: {letters}", "Which letter is a capital: {letters}"),
        draw=_draw_capital,
        solve=lambda given: "".join(filter(str.isupper, given["letters"])),
    ),
}
