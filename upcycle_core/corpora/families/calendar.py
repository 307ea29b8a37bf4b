"""Families about days and dates."""

import datetime
import itertools
from random import Random

from upcycle_core.corpora.families.family import Family, Given, Instance, draw_words
from upcycle_core.corpora.families.words import DAYS, MONTHS, WORDS

_MONDAY = datetime.date(2024, 1, 1)


def _days(rng: Random, fewest: int, most: int) -> list[str]:
    return rng.choices(DAYS.split(), k=rng.randint(fewest, most))


def _draw_next_day(rng: Random) -> Instance:
    days, week = _days(rng, 3, 4), DAYS.split()
    answer = " ".join(week[(week.index(day) + 1) % 7] for day in days)
    return Instance({"days": " ".join(days)}, answer)


def _draw_day(rng: Random) -> Instance:
    day = rng.choice(DAYS.split())
    words = [day, *draw_words(rng, WORDS, rng.randint(2, 4))]
    rng.shuffle(words)
    return Instance({"words": " ".join(words)}, day)


def _draw_weekend(rng: Random) -> Instance:
    days = rng.choices(DAYS.split()[:5], k=rng.randint(3, 5))
    is_there = rng.random() < 0.5
    if is_there:
        days[rng.randrange(len(days))] = rng.choice(("sat", "sun"))
    return Instance({"days": " ".join(days)}, "yes" if is_there else "no")


def _date(rng: Random) -> tuple[str, str, str]:
    return str(rng.randint(1, 28)), rng.choice(MONTHS.split()), str(rng.randint(1950, 2049))


def _draw_month(rng: Random) -> Instance:
    date = _date(rng)
    return Instance({"date": " ".join(date)}, date[1])


def _next_day(given: Given) -> str:
    """By the calendar: the first week of 2024 starts with a Monday."""
    names = DAYS.split()
    week = [_MONDAY + datetime.timedelta(days=day) for day in range(8)]
    after = {names[a.weekday()]: names[b.weekday()] for a, b in itertools.pairwise(week)}
    return " ".join(after[day] for day in given["days"].split())


def _day(given: Given) -> str:
    return next(day for day in DAYS.split() if day in given["words"])


def _weekend(given: Given) -> str:
    return "yes" if "sat" in given["days"] or "sun" in given["days"] else "no"


CALENDAR = {
    "next_day": Family(
        domain="calendar",
        phrasings=("Give the next day of each: {days}", "Which day is after each: {days}"),
        draw=_draw_next_day,
        solve=_next_day,
    ),
    "has_weekend": Family(
        domain="calendar",
        phrasings=("Is there a weekend day: {days}", "Is one of them a weekend day: {days}"),
        draw=_draw_weekend,
        solve=_weekend,
    ),
    "month_of_date": Family(
        domain="calendar",
        phrasings=("Give the month: {date}", "Which month is it: {date}"),
        draw=_draw_month,
        solve=lambda given: given["date"].strip("0123456789 "),
    ),
    "day_of_week": Family(
        domain="calendar",
        phrasings=("Give the day of the week: {words}", "Which one is a day of the week: {words}"),
        draw=_draw_day,
        solve=_day,
    ),
}
