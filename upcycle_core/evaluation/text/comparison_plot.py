"""Score against compute: what each way of making one model reaches, and at what price."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.report.canvas import ACCENTS, FAINT, INK, NEUTRAL, new_figure, save
from upcycle_core.evaluation.report.labels import Label, place_labels


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
        labels = []
        ordered = sorted(known.items(), key=lambda item: -item[1]["scores"]["average"][0])
        for name, row in ordered:
            minutes = row["core_seconds"] / 60
            mean, deviation = row["scores"]["average"]
            chosen = name == highlight
            colour = ACCENTS[0] if chosen else INK if minutes else NEUTRAL
            ax.errorbar(minutes, mean, yerr=deviation or None, fmt="o", color=colour, capsize=3)
            text = ACCENTS[0] if chosen else INK
            labels.append(Label(minutes, mean, row["title"], text, bold=chosen))
        ax.margins(0.12, 0.08)
        ax.grid(color=FAINT, alpha=0.15)
        ax.set_xlabel("core minutes after the seed, training of the experts included")
        ax.set_ylabel("normalised average perplexity (%)")
        figure.draw_without_rendering()  # labels need the places that the layout gives to points
        figure.set_layout_engine("none")
        place_labels(ax, [[label] for label in labels])
        save(figure, path)
