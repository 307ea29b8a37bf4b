"""Ways of making one model side by side: their scores, and what each costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.labels import Label, place_labels
from upcycle_core.evaluation.report.numbers import amount, number
from upcycle_core.evaluation.report.parts import DASH, Block, Table
from upcycle_core.evaluation.text.results import gaps

Rows = Mapping[str, Mapping[str, Any]]
"""{row: what ``comparison.across_seeds`` gives}"""
SCORES = "Perplexity on held-out text in percent of each domain's own dense expert"
COSTS = (
    "Tokens count the experts that a row begins with; core time is time times cores, theirs "
    "included; trained, active and all are parameters; peak memory is that of the largest process."
)
GIVEN = (
    f" {DASH}: unknown. What given experts were trained on, and for how long, is said nowhere, and "
    "no budget counts it."
)


def comparison_table(rows: Rows, *, seeds: int = 1, tokens: int | None = None) -> Table:
    """One line a row: scores, parameters and cost.

    Args:
        rows: What is shown.
        seeds: How many runs that was; deviations are shown where there are several.
        tokens: The budget of every trained row, if there was one.
    """
    columns = list(next(iter(rows.values()))["scores"])
    head = ["Method", *columns, "Trained", "Active", "All", "Tokens", "Core time", "Peak memory"]
    lines = []
    for row in rows.values():
        scores = [row["scores"][column] for column in columns]
        counts = [row[f"{kind}_parameters"] for kind in ("trained", "active", "total")]
        seconds, memory = row["core_seconds"], row["peak_memory_bytes"]
        lines.append(
            [
                row["title"],
                *(number(mean, spread if seeds > 1 else None) for mean, spread in scores),
                *map(amount, counts),
                DASH if row["tokens"] is None else amount(row["tokens"]),
                DASH if seconds is None else f"{number(seconds / 60)} min",
                f"{number(memory / 1e9, digits=2)} GB" if memory else DASH,
            ]
        )
    spread = f", mean ± deviation over {seeds} seeds" if seeds > 1 else ""
    budget = f"Every trained row sees {tokens:,} tokens after the seed. " if tokens else ""
    given = GIVEN if any(row["tokens"] is None for row in rows.values()) else ""
    return Table(head, lines, f"{SCORES}{spread}; higher is better. {budget}{COSTS}{given}")


def comparison_blocks(rows: Rows, *, seeds: int = 1, tokens: int | None = None) -> list[Block]:
    """The table, and below it what the averaged backbone and the routers cost."""
    averages = {name: row["scores"]["average"][0] for name, row in rows.items()}
    return [comparison_table(rows, seeds=seeds, tokens=tokens), *gaps(averages)]


def draw_comparison(rows: Rows, path: Path, *, highlight: str) -> None:
    """Normalised average against core time, a point a row; rows of unknown cost are left out.

    Args:
        rows: What is shown.
        path: The PNG to write.
        highlight: The row that is coloured.
    """
    known = {name: row for name, row in rows.items() if row["core_seconds"] is not None}
    with canvas.new_figure(8.4, 5.4) as figure:
        ax = figure.subplots()
        labels = []
        ordered = sorted(known.items(), key=lambda item: -item[1]["scores"]["average"][0])
        for name, row in ordered:
            minutes = row["core_seconds"] / 60
            mean, deviation = row["scores"]["average"]
            chosen = name == highlight
            colour = canvas.ACCENTS[0] if chosen else canvas.INK if minutes else canvas.NEUTRAL
            ax.errorbar(minutes, mean, yerr=deviation or None, fmt="o", color=colour, capsize=3)
            text = canvas.ACCENTS[0] if chosen else canvas.INK
            labels.append(Label(minutes, mean, row["title"], text, bold=chosen))
        ax.margins(0.12, 0.08)
        ax.grid(color=canvas.FAINT, alpha=0.15)
        ax.set_xlabel("core minutes after the seed, training of the experts included")
        ax.set_ylabel("normalised average perplexity (%)")
        canvas.settle(figure)
        place_labels(ax, [[label] for label in labels])
        canvas.save(figure, path)
