"""Scores on instructions as text: for the terminal, as Markdown, as CSV. All from ``metrics``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upcycle_core.evaluation.instructions.results import best_rows
from upcycle_core.evaluation.instructions.scores import METRICS, SPLITS, Metric, Split
from upcycle_core.evaluation.text.table import align, csv_text

NOTHING = "–"
NAMES: dict[Metric, str] = {"exact_match": "exact match", "rouge_l": "ROUGE-L"}
ACROSS = 14
"""More categories than this stand below each other, models beside each other."""
CAPTION = (
    "Exact match and ROUGE-L in percent, the mean over task categories, each counting the same. "
    "Unseen: categories that training did not have. Best of its column: marked. Parameters: of the "
    "saved model; by density: the pre-trained model's and the masks' mean density times the "
    "experts' (the paper's count); trained: those that training changes."
)


@dataclass(frozen=True)
class Cell:
    """What is shown, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table of text.

    Args:
        heading: What it shows.
        header: Column titles.
        lines: (title, one cell a further column).
    """

    heading: str
    header: list[str]
    lines: list[tuple[str, list[Cell]]]


def tables(rows: Mapping[str, Any]) -> Iterator[Table]:
    """One a group of rows, then the first group's by category: unseen, seen.

    Args:
        rows: What ``results.metrics`` gave.
    """
    groups = list(dict.fromkeys(group for row in rows.values() for group in row["groups"]))
    members = {group: [n for n, row in rows.items() if group in row["groups"]] for group in groups}
    for group in groups:
        yield _group_table(group, {name: rows[name] for name in members[group]})
    shown = {name: rows[name] for name in members[groups[0]]}
    for split in ("unseen", "seen"):
        asked = {name: row for name, row in shown.items() if row[split] is not None}
        for metric in ("rouge_l", "exact_match"):
            if asked:
                yield _category_table(asked, split, metric)


def format_tables(rows: Mapping[str, Any]) -> str:
    """The tables and notes for a terminal; the best of a column has a star."""
    parts = []
    for table in tables(rows):
        lines = [
            [title, *(f"{cell.text}{'*' if cell.best else ' '}" for cell in cells)]
            for title, cells in table.lines
        ]
        parts += [table.heading, "", align([table.header, *lines]), ""]
    return "\n".join([*parts, CAPTION, *notes(rows)]) + "\n"


def markdown_tables(rows: Mapping[str, Any]) -> str:
    """The tables and notes in Markdown; the best of a column is bold."""
    parts = []
    for table in tables(rows):
        lines = [table.header, ["---", *["---:"] * (len(table.header) - 1)]]
        lines += [
            [title, *(f"**{cell.text}**" if cell.best else cell.text for cell in cells)]
            for title, cells in table.lines
        ]
        marked = ["| " + " | ".join(map(_escaped, line)) + " |" for line in lines]
        parts += [f"## {table.heading}", "", *marked, ""]
    return "\n".join([*parts, CAPTION, *(f"\n- {note}" for note in notes(rows))]) + "\n"


def csv_scores(rows: Mapping[str, Any]) -> str:
    """Unrounded: one line a row, set and category; category ``mean`` is the mean over them."""
    head = ["row", "title", "split", "category", "count"]
    head += [f"{metric}{kind}" for metric in METRICS for kind in ("", "_deviation")]
    lines = []
    for name, row in rows.items():
        for split in SPLITS:
            own = row[split]
            if own is not None:
                for category, score in [("mean", own), *own["categories"].items()]:
                    numbers = [
                        score[metric][kind] for metric in METRICS for kind in ("mean", "deviation")
                    ]
                    first = [name, row["title"], split, category, score["count"]]
                    lines.append([*first, *numbers])
    return csv_text(head, lines)


def notes(rows: Mapping[str, Any]) -> list[str]:
    """What a reader must know besides: seeds, sizes of the sets, prompts that were cut."""
    found = []
    seeds = {row["title"]: len(row["runs"]) for row in rows.values()}
    if max(seeds.values()) > 1:
        numbers = set(seeds.values())
        many = f"{numbers.pop()} seeds" if len(numbers) == 1 else "several seeds"
        found.append(f"Mean ± sample standard deviation over {many}.")
    for split in ("unseen", "seen"):
        asked = [row for row in rows.values() if row[split] is not None]
        if asked:
            own = asked[0][split]
            sizes = f"{own['count']:,} instances of {len(own['categories'])} categories"
            found.append(f"{split.capitalize()}: {sizes}.")
        cut: dict[int, list[str]] = {}
        for row in asked:
            cut.setdefault(row[split]["truncated"], []).append(row["title"])
        found += [
            f"{split.capitalize()}, prompts that lost tokens from the left to fit the model: "
            f"{number:,} of {', '.join(titles)}."
            for number, titles in cut.items()
            if number
        ]
    return found


def amount(count: float) -> str:
    """A number of parameters."""
    if not count:
        return "0"
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if count >= 0.1 * size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} k"


def percent(score: Mapping[str, float], *, spread: bool) -> str:
    """A share as percent, with its deviation where there are several seeds."""
    text = f"{100 * score['mean']:.1f}"
    return f"{text} ± {100 * score['deviation']:.1f}" if spread else text


def _group_table(heading: str, rows: Mapping[str, Any]) -> Table:
    by_density = any(row["density_parameters"] for row in rows.values())
    counts = {"Parameters": "total_parameters", "Trained": "trained_parameters"}
    if by_density:
        counts = {"Parameters": "total_parameters", "By density": "density_parameters"} | counts
    columns: dict[str, list[Cell]] = {
        title: [Cell(amount(row[n]["mean"]) if row[n] else NOTHING) for row in rows.values()]
        for title, n in counts.items()
    }
    for split in SPLITS:
        for metric in METRICS:
            scores = {name: row[split] and row[split][metric] for name, row in rows.items()}
            if any(scores.values()):
                columns[f"{split.capitalize()}, {NAMES[metric]}"] = _score_cells(rows, scores)
    return _table(heading, "Model", rows, columns)


def _category_table(rows: Mapping[str, Any], split: Split, metric: Metric) -> Table:
    heading = f"{split.capitalize()} categories, {NAMES[metric]}"
    columns: dict[str, list[Cell]] = {}
    for category in next(iter(rows.values()))[split]["categories"]:
        scores = {name: row[split]["categories"][category][metric] for name, row in rows.items()}
        columns[category] = _score_cells(rows, scores)
    means = {name: row[split][metric] for name, row in rows.items()}
    columns["Average"] = _score_cells(rows, means)
    if len(columns) - 1 <= ACROSS:
        return _table(heading, "Model", rows, columns)
    header = ["Category", *(row["title"] for row in rows.values())]
    return Table(heading, header, list(columns.items()))


def _score_cells(rows: Mapping[str, Any], scores: Mapping[str, Any]) -> list[Cell]:
    """One cell a row; the best as it is shown is marked, several where they look the same."""
    best = best_rows({name: own and round(own["mean"], 3) for name, own in scores.items()})
    return [
        Cell(percent(own, spread=len(rows[name]["runs"]) > 1), name in best)
        if own
        else Cell(NOTHING)
        for name, own in scores.items()
    ]


def _table(
    heading: str, first: str, rows: Mapping[str, Any], columns: Mapping[str, Sequence[Cell]]
) -> Table:
    lines = [
        (row["title"], [cells[place] for cells in columns.values()])
        for place, row in enumerate(rows.values())
    ]
    return Table(heading, [first, *columns], lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
