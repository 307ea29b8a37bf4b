"""Pictures of a compression: quality against size, and cosines of experts and base.

Each ``draw_`` function writes a PNG.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle_core.evaluation.compression import results
from upcycle_core.evaluation.compression.results import Sweep
from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.labels import Label, place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = ("sparse", "quantised", "low_rank")
_MARKERS, _DASHES = "osD", ("-", (0, (4, 2)), (0, (1, 1.5)))
_TICKS = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000)
_RING: dict[str, Any] = {"marker": "o", "ms": 13, "mfc": "none", "mec": canvas.INK, "mew": 1.4}
# A lower panel shows the neighbourhood of the original: so many tolerances below it, two above.
_NEAR = 5
TICKS_SHOWN = 8


def draw_sweeps(sweeps: Sequence[Sweep], tolerance: float, path: Path) -> None:
    """Normalised average against size, a column a model, a line a codec.

    Above the whole range, below what lies near the original.

    Args:
        sweeps: What is shown.
        tolerance: Percent of the original's average that may be lost: a band.
    """
    lines = list(dict.fromkeys(line for sweep in sweeps for line in results.by_series(sweep)))
    styles = _styles(lines)
    with canvas.new_figure(max(5.3 * len(sweeps), 6.4) + 0.3, 7.2) as figure:
        grid = figure.subplots(2, len(sweeps), squeeze=False, sharex="col", height_ratios=(1, 1.3))
        placed: list[tuple[Axes, list[list[Label]], float]] = []
        for column, sweep in enumerate(sweeps):
            found = results.metrics(sweep, tolerance)
            for ax in grid[:, column]:
                curves = _panel(ax, sweep, found, styles)
                placed.append((ax, curves, found["original"]["normalised_average"]))
            _zoom(grid[1][column], found)
            _size_axis(grid[1][column], found)
            grid[0][column].set_title(sweep.source, loc="left", fontweight="bold")
            grid[1][column].set_title("near the original", loc="left", color=canvas.FAINT)
            grid[1][column].set_xlabel("size, % of the original's weight files (log scale)")
        for row in grid:
            row[0].set_ylabel("normalised average (%)")
        handles = [grid[0][0].plot([], [], label=line, **styles[line])[0] for line in lines]
        handles.append(grid[0][0].plot([], [], **_RING, ls="")[0])
        words = [*lines, f"smallest within {tolerance:g} % of the original"]
        columns = min(len(words), 2 if len(sweeps) == 1 else 4)
        figure.legend(handles, words, loc="outside upper left", ncols=columns, frameon=False)
        canvas.settle(figure)
        for ax, curves, average in placed:
            place_labels(ax, curves, heights=[average])
        canvas.save(figure, path)


def draw_cosines(cosines: Mapping[str, Any], path: Path) -> None:
    """Heat maps of the first and the last MoE layer (DeRS, Fig. 1): of ``cosine_similarities``."""
    names, layers = cosines["names"], cosines["layers"]
    shown = list(dict.fromkeys([next(iter(layers)), list(layers)[-1]]))
    least = min(value for layer in shown for row in layers[layer] for value in row)
    digits = _digits(least)
    side = 0.62 * len(names) + (0.5 if digits < 4 else 0.9)
    with canvas.new_figure(max(side * len(shown) + 1.6, 5.2), side + 1.0) as figure:
        axes = figure.subplots(1, len(shown), squeeze=False)[0]
        low = least if least < 1 else 0.0
        for ax, layer in zip(axes, shown, strict=True):
            picture = canvas.heat_map(ax, layers[layer], text=lambda v: f"{v:.{digits}f}", low=low)
            ax.set_title(f"layer {layer}")
            ax.set_xticks(range(len(names)), names)
            ax.set_yticks(range(len(names)), names if ax is axes[0] else [])
        canvas.colour_bar(figure, picture, axes, shrink=0.85)
        figure.suptitle("Cosine similarity of whole FFNs", x=0.01, ha="left")
        canvas.save(figure, path)


def _digits(least: float) -> int:
    """As many as tell the farthest two apart from the same: at least 2, at most 5."""
    distance = 1 - least
    return 2 if distance <= 0 else min(max(2, 1 - math.floor(math.log10(distance))), 5)


def _styles(lines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and marker a codec, a dash a variant of it."""
    variants = {kind: count() for kind in _KINDS}
    styles = {}
    for line in lines:
        kind = next(k for k in _KINDS if line.startswith(k.replace("_", " ")))
        place = _KINDS.index(kind)
        styles[line] = {
            "color": canvas.ACCENTS[place],
            "marker": _MARKERS[place],
            "ls": _DASHES[next(variants[kind]) % len(_DASHES)],
            "lw": 1.6,
            "ms": 5,
        }
    return styles


def _panel(
    ax: "Axes", sweep: Sweep, found: Mapping[str, Any], styles: Mapping[str, dict[str, Any]]
) -> list[list[Label]]:
    """Lines, band and ring of one model; what its points are to be called."""
    average, chosen = found["original"]["normalised_average"], found["chosen"]
    places = {
        name: (own["percent_of_original"], own["normalised_average"])
        for name, own in found["points"].items()
    }
    ax.axhspan(found["least_average"], average, color=canvas.NEUTRAL, alpha=0.28, lw=0, zorder=0)
    ax.axhline(average, color=canvas.FAINT, lw=1.1, ls="--", zorder=1)
    ax.axvline(100, color=canvas.GRID, lw=1, zorder=0)
    curves = []
    for line, names in results.by_series(sweep).items():
        ax.plot(*zip(*(places[name] for name in names), strict=True), zorder=3, **styles[line])
        texts = {name: results.setting(sweep.points[name].codec) for name in names}
        curves.append(
            [
                Label(*places[name], text, styles[line]["color"], bold=name == chosen)
                for name, text in texts.items()
            ]
        )
    if chosen is not None:
        ax.plot(*places[chosen], zorder=4, **_RING)
    canvas.log_axis(ax)
    ax.margins(x=0.08, y=0.1)
    ax.grid(axis="y", color=canvas.GRID)
    canvas.beside(ax, f"original\n{average:.1f}", average)
    return curves


def _zoom(ax: "Axes", found: Mapping[str, Any]) -> None:
    average = found["original"]["normalised_average"]
    values = [own["normalised_average"] for own in found["points"].values()]
    step = average * max(found["tolerance"], 0.2) / 100
    near = [value for value in values if abs(value - average) <= _NEAR * step]
    top = max([average, *near])
    bottom = min([found["least_average"], *near])
    room = 0.14 * (top - bottom) or step
    ax.set_ylim(bottom - room, top + room)


def _size_axis(ax: "Axes", found: Mapping[str, Any]) -> None:
    shares = [own["percent_of_original"] for own in found["points"].values()]
    low, high = min([100.0, *shares]), max([100.0, *shares])
    ticks = [tick for tick in _TICKS if low / 1.05 <= tick <= high * 1.05]
    while len(ticks) > TICKS_SHOWN:
        ticks = [tick for place, tick in enumerate(ticks) if place % 2 == 0 or tick == 100]
    ax.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(low / 1.12, high * 1.12)
