"""The picture of task scores: a panel of bars for every task."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.numbers import number
from upcycle_core.evaluation.report.parts import DASH
from upcycle_core.evaluation.text.results import expert_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHAMPION = "champion"
_COLUMNS = 3


def draw_tasks(found: Mapping[str, Any], path: Path) -> None:
    """Horizontal bars of every row's score, a panel a task, each with an axis of its own.

    The subject and the champion are coloured, its other rivals dark; experts and all others pale. A
    dotted line stands at the score of the domain's own expert.

    Args:
        found: What ``results.metrics`` gave.
        path: The PNG to write.
    """
    rows, tasks = list(found["scores"]), list(found["tasks"])
    columns = min(len(tasks), _COLUMNS)
    lines = math.ceil(len(tasks) / columns)
    titles = [found["titles"][row] for row in rows]
    width = 2.9 * columns + 0.07 * max(map(len, titles))
    with canvas.new_figure(width, (0.27 * len(rows) + 0.75) * lines) as figure:
        grid = figure.subplots(lines, columns, squeeze=False)
        for index, ax in enumerate(grid.flat):
            if index >= len(tasks):
                ax.set_axis_off()
                continue
            _panel(ax, found, tasks[index])
            ax.set_yticks(range(len(rows)), titles if index % columns == 0 else [""] * len(rows))
            for label, row in zip(ax.get_yticklabels(), rows, strict=True):
                label.set_fontweight("bold" if row == found["subject"] else "normal")
        canvas.save(figure, path)


def _panel(ax: "Axes", found: Mapping[str, Any], task: str) -> None:
    about, ends = found["tasks"][task], [0.0]
    is_share = about["is_share"]
    scale = 100 if is_share else 1
    own = expert_row(about["domain"]) if about["domain"] else ""
    for place, (row, scores) in enumerate(found["scores"].items()):
        score = scores.get(task)
        if score is None:
            _label(ax, DASH, 0.0, place)
            continue
        mean, deviation = scale * score["mean"], scale * score["deviation"]
        ax.barh(place, mean, color=_colour(found, row), height=0.7)
        if deviation:
            ax.errorbar(mean, place, xerr=deviation, color=canvas.INK, capsize=2.5, lw=1)
        ends.append(mean + deviation)
        _label(ax, number(mean, digits=1 if is_share else 2), mean + deviation, place)
        if row == own:
            ax.axvline(mean, color=canvas.FAINT, lw=1, ls=":", zorder=0)
    # Room for the number behind the longest bar; an axis needs a width even if all scores are 0.
    ax.set_xlim(min(0.0, *ends), 1.24 * max(ends) or 1.0)
    ax.set_ylim(len(found["scores"]) - 0.5, -0.5)  # rows without a score keep their place
    ax.tick_params("y", length=0)
    ax.tick_params("x", labelsize=8, colors=canvas.FAINT)
    ax.set_title(title_of(task, about), fontweight="bold", loc="left", pad=16)
    better = "higher" if about["higher_is_better"] else "lower"
    unit = about["metric"] + (", %" if is_share else f", {better} is better")
    ax.annotate(unit, (0, 1), (0, 5), "axes fraction", "offset points", color=canvas.FAINT)


def title_of(task: str, about: Mapping[str, Any]) -> str:
    """Its name, with the way that is better where it is no rate in percent."""
    if about["is_share"]:
        return task
    return f"{task} {'↑' if about['higher_is_better'] else '↓'}"


def _label(ax: "Axes", text: str, end: float, place: int) -> None:
    ax.annotate(
        text,
        (end, place),
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        bbox={"color": "white", "pad": 0.6},
    )


def _colour(found: Mapping[str, Any], row: str) -> str:
    if row == found["subject"]:
        return canvas.ACCENTS[0]
    if row == CHAMPION:
        return canvas.ACCENTS[1]
    return canvas.FAINT if row in found["rivals"] else canvas.NEUTRAL
