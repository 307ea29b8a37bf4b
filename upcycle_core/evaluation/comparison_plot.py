"""Score against compute: what each way of making one model reaches, and at what price."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.canvas import ACCENTS, FAINT, INK, NEUTRAL, new_figure, save

LETTER = 0.016
"""Width of a letter of a label, in widths of the points' range."""


def draw_comparison(rows: Mapping[str, Mapping[str, Any]], path: Path, *, highlight: str) -> None:
    """Normalised average against core time, a point a row; rows of unknown cost are left out.

    Args:
        rows: What ``comparison.across_seeds`` gave.
        path: The PNG to write.
        highlight: The row that is coloured.
    """
    known = {name: row for name, row in rows.items() if row["core_seconds"] is not None}
    with new_figure(8.4, 5.4) as figure:
        ax = figure.subplots()
        placed: list[tuple[float, float]] = []
        ordered = sorted(known.items(), key=lambda item: -item[1]["scores"]["average"][0])
        for name, row in ordered:
            minutes = row["core_seconds"] / 60
            mean, deviation = row["scores"]["average"]
            colour = ACCENTS[0] if name == highlight else INK if minutes else NEUTRAL
            ax.errorbar(minutes, mean, yerr=deviation or None, fmt="o", color=colour, capsize=3)
            placed.append((minutes, mean))
        offset = _span(placed, 0) * 0.015
        widths = [len(row["title"]) * _span(placed, 0) * LETTER for _, row in ordered]
        heights = _label_heights(placed, widths)
        for (name, row), (minutes, _), height in zip(ordered, placed, heights, strict=True):
            colour = ACCENTS[0] if name == highlight else INK
            ax.text(minutes + offset, height, row["title"], color=colour, va="center", fontsize=8.5)
        ends = [minutes + width for (minutes, _), width in zip(placed, widths, strict=True)]
        ax.set_xlim(-0.04 * max(ends), 1.04 * max(ends))
        ax.grid(color=FAINT, alpha=0.15)
        ax.set_xlabel("core minutes after the seed, training of the experts included")
        ax.set_ylabel("normalised average perplexity (%)")
        save(figure, path)


def _label_heights(places: list[tuple[float, float]], widths: list[float]) -> list[float]:
    """Heights of labels, highest first: each moves down until it is clear of those above it."""
    gap = _span(places, 1) * 0.035
    heights: list[float] = []
    for place, (x, height) in enumerate(places):
        above = [
            heights[i]
            for i in range(place)
            if places[i][0] < x + widths[place] and x < places[i][0] + widths[i]
        ]
        for other in sorted(above, reverse=True):
            if abs(other - height) < gap:
                height = other - gap
        heights.append(height)
    return heights


def _span(places: list[tuple[float, float]], axis: int) -> float:
    values = [place[axis] for place in places]
    return (max(values) - min(values)) or 1.0
