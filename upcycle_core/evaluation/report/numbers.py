"""Numbers as reports print them, and what may be said of them at the digits that are printed."""

import math
import re
from collections.abc import Collection, Mapping

from upcycle_core.evaluation.report.parts import DASH, Cell

MORE_DIGITS = 3
"""Further decimals that are printed at most to show that an interval excludes zero."""


def number(value: float | None, deviation: float | None = None, *, digits: int = 1) -> str:
    """A value, or ``mean ± deviation``: ``91.4``, ``91.4 ± 1.8``; a dash for None, ``∞`` for inf.

    What is no number is called so: ``nan``.

    Args:
        value: The value or mean.
        deviation: Its standard deviation; None where it was measured once.
        digits: Decimals.
    """
    if value is None:
        return DASH
    text = "∞" if math.isinf(value) else f"{value:z.{digits}f}"
    return text if deviation is None else f"{text} ± {number(deviation, digits=digits)}"


def signed(value: float | None, *, digits: int = 1) -> str:
    """A value with its sign, ``+0.0`` for none at these digits; a dash for None."""
    return DASH if value is None else f"{value:+z.{digits}f}"


def amount(count: float) -> str:
    """A large count in thousands (k), millions (M) or billions (B): ``2.0 k``, ``3.23 M``."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if count >= 0.1 * size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} k" if count else "0"


def best(values: Mapping[str, float | None], *, digits: int = 1, higher: bool = True) -> str | None:
    """The key of the best value as it is printed, alone and against another: a tie is no winner.

    Args:
        values: {key: value, in the unit that is printed; None where unknown}.
        digits: Decimals that are printed.
        higher: Whether more is better.

    Returns:
        The key; None where two print the same best value, or fewer than two values are known.
    """
    printed = {key: float(f"{v:.{digits}f}") for key, v in values.items() if v is not None}
    ranked = sorted(printed, key=lambda key: printed[key], reverse=higher)
    if len(ranked) < 2 or printed[ranked[0]] == printed[ranked[1]]:
        return None
    return ranked[0]


def cells(
    values: Mapping[str, tuple[float, float | None]],
    *,
    digits: int = 1,
    higher: bool = True,
    left_out: Collection[str] = (),
) -> dict[str, Cell]:
    """A column of scores, the ``best`` of them marked.

    Args:
        values: {row: mean and deviation, None where it was measured once}.
        digits: Decimals that are printed.
        higher: Whether more is better.
        left_out: Rows that cannot be the best.
    """
    running = {row: mean for row, (mean, _) in values.items() if row not in left_out}
    winner = best(running, digits=digits, higher=higher)
    return {
        row: Cell(number(mean, deviation, digits=digits), "best" if row == winner else None)
        for row, (mean, deviation) in values.items()
    }


def interval(mean: float, low: float, high: float, *, digits: int = 1) -> tuple[str, bool]:
    """A difference with its interval, and whether what is printed excludes zero.

    An interval that excludes zero by less than the digits show is printed with up to
    ``MORE_DIGITS`` more; if that does not do either, it is not said to exclude zero.

    Returns:
        ``+1.2 [+0.3, +2.1]`` and True; ``-0.004 [-0.009, -0.001]`` and True; ``+0.0 [-0.3, +0.2]``
        and False.
    """
    if low > 0 or high < 0:
        for decimals in range(digits, digits + MORE_DIGITS + 1):
            if float(f"{low:.{decimals}f}") > 0 or float(f"{high:.{decimals}f}") < 0:
                return _interval(mean, low, high, decimals), True
    return _interval(mean, low, high, digits), False


def _interval(mean: float, low: float, high: float, digits: int) -> str:
    centre, left, right = (signed(value, digits=digits) for value in (mean, low, high))
    return f"{centre} [{left}, {right}]"


def slug(name: str) -> str:
    """A name as part of a file's or an artifact's: lower-case letters, digits, single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
