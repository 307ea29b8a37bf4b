"""Labels of points that keep clear of each other, of the points and of the lines between them.

Everything here is measured in points, 1/72 inch, from the figure's corner.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 8.0
# A letter's width, a line's height, half a marker, half a chosen point's ring.
_LETTER, _HEIGHT, _MARKER, _RING = 0.58 * SIZE, 1.1 * SIZE, 3.0, 7.0
_STEP = 2.0  # a line is avoided as boxes of this size along it
_PLACES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


@dataclass(frozen=True)
class Label:
    """A point and what it is called.

    Args:
        x: Where it is, in data units.
        y: The same.
        text: What is written beside it.
        colour: Of the text.
        bold: Whether it is set in bold, clear of a ring around the point.
    """

    x: float
    y: float
    text: str
    colour: str
    bold: bool = False


def place_labels(
    ax: "Axes", curves: Sequence[Sequence[Label]], *, heights: Sequence[float] = ()
) -> None:
    """Write each label above, below or beside its point, where it covers least; bold ones first.

    Limits and layout must be final. Points outside the axes get none.

    Args:
        ax: Where.
        curves: Points that lines run through, one sequence a line.
        heights: Of horizontal lines that are kept clear as well, in data units.
    """
    from matplotlib.patheffects import withStroke

    frame, unit = ax.get_window_extent(), _unit(ax)
    edge = (frame.x0 * unit, frame.y0 * unit, frame.x1 * unit, frame.y1 * unit)
    levels = [_position(ax, ax.get_xlim()[0], height)[1] for height in heights]
    taken: list[Box] = [(edge[0], level - 0.5, edge[2], level + 0.5) for level in levels]
    seen: list[tuple[Label, float, float]] = []
    for curve in curves:
        places = [_position(ax, label.x, label.y) for label in curve]
        for start, end in pairwise(places):
            taken += _along(start, end)
        inside = [_overlap((x, y, x + 1, y + 1), edge) > 0 for x, y in places]
        for label, (x, y), is_inside in zip(curve, places, inside, strict=True):
            if is_inside:
                half = _RING if label.bold else _MARKER
                taken.append((x - half, y - half, x + half, y + half))
                seen.append((label, x, y))
    for label, x, y in sorted(seen, key=lambda found: not found[0].bold):
        boxes = [_box(x, y, label, place) for place in _PLACES]
        best = min(boxes, key=lambda box: sum(_overlap(box, t) for t in taken) + _out(box, edge))
        taken.append(best)
        ax.annotate(
            label.text,
            (label.x, label.y),
            ((best[0] + best[2]) / 2 - x, (best[1] + best[3]) / 2 - y),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=SIZE,
            color=label.colour,
            fontweight="bold" if label.bold else "normal",
            path_effects=[withStroke(linewidth=2, foreground="white")],
            zorder=5,
        )


def _position(ax: "Axes", x: float, y: float) -> tuple[float, float]:
    x, y = ax.transData.transform((x, y)) * _unit(ax)
    return float(x), float(y)


def _unit(ax: "Axes") -> float:
    """Points a pixel."""
    figure = ax.get_figure(root=True)
    return 72 / figure.dpi if figure is not None else 1.0


def _along(start: tuple[float, float], end: tuple[float, float]) -> Iterator[Box]:
    steps = max(1, math.ceil(math.dist(start, end) / _STEP))
    for step in range(steps):
        x = start[0] + (end[0] - start[0]) * step / steps
        y = start[1] + (end[1] - start[1]) * step / steps
        yield (x - _STEP / 2, y - _STEP / 2, x + _STEP / 2, y + _STEP / 2)


def _box(x: float, y: float, label: Label, place: tuple[int, int]) -> Box:
    """The box of a label on one side of its point."""
    gap = 1.5 + (_RING if label.bold else _MARKER)
    width = _LETTER * len(label.text) * (1.1 if label.bold else 1)
    centre_x = x + place[0] * (width / 2 + gap)
    centre_y = y + place[1] * (_HEIGHT / 2 + (gap if place[0] == 0 else 0))
    left, bottom = centre_x - width / 2, centre_y - _HEIGHT / 2
    return (left, bottom, centre_x + width / 2, centre_y + _HEIGHT / 2)


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0


def _out(box: Box, edge: Box) -> float:
    """How much of a box lies outside the axes."""
    return (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, edge)
