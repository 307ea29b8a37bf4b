"""The score table as text: for the terminal, as Markdown, as CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from upcycle_core.evaluation.text import results, scores
from upcycle_core.evaluation.text.results import Evaluation

_TITLES = {
    "seed": "Seed",
    "model_averaging": "Model averaging",
    "random_routing": "Random routing",
    "dume": "DUME",
    "dume_ood": "DUME OOD",
    "oracle": "Oracle",
    "harmonised": "Symphony, untrained",
    "symphony": "Symphony-MoE",
}
CAPTION = (
    "Perplexity on held-out text, normalised: 100 is the domain's own dense expert, higher is "
    "better. Bold: the best in its column; the oracle, which is told the domain, and the domain's "
    "own expert are left out."
)


@dataclass(frozen=True)
class Cell:
    """A normalised score as it is shown."""

    text: str
    best: bool


def title(row: str, domains: Iterable[str]) -> str:
    """What people call a row."""
    for domain in domains:
        if row == results.expert_row(domain):
            return f"{domain} expert"
    return _TITLES.get(row, row.replace("_", " "))


def header(evaluation: Evaluation) -> list[str]:
    """The table's column titles."""
    return ["Method", *evaluation.domains, "Average"]


def cells(evaluation: Evaluation) -> dict[str, list[Cell]]:
    """{row: one cell a domain, then the average}, in the paper's order."""
    spread = results.deviations(evaluation)
    columns = [*evaluation.domains, "average"]
    best = {domain: results.best_row(evaluation, domain) for domain in evaluation.domains}
    best["average"] = results.best_row(evaluation)
    table = {}
    for row, values in results.normalised_table(evaluation).items():
        shown = {**values, "average": scores.average(values)}
        table[row] = [
            Cell(_number(shown[column], spread.get(row, {}).get(column)), best[column] == row)
            for column in columns
        ]
    return table


def format_table(evaluation: Evaluation) -> str:
    """The table for a terminal: aligned columns, the best of each marked with a star."""
    lines = [header(evaluation)]
    for row, values in cells(evaluation).items():
        marked = [f"{cell.text}{'*' if cell.best else ' '}" for cell in values]
        lines.append([title(row, evaluation.domains), *marked])
    return align(lines)


def format_timings(seconds: Mapping[str, float]) -> str:
    """Where the time went: one line a stage with its share of the total, for a terminal.

    Args:
        seconds: {what: its seconds}, in the order they are shown.
    """
    total = sum(seconds.values())
    lines = [["Stage", "Seconds", "Share"]]
    lines += [[name, f"{s:.2f}", f"{100 * s / total:.2f} %"] for name, s in seconds.items()]
    return align([*lines, ["total", f"{total:.2f}", "100.00 %"]])


def markdown_table(evaluation: Evaluation) -> str:
    """The table in Markdown with its caption; the best of each column is bold."""
    head = header(evaluation)
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row, values in cells(evaluation).items():
        marked = [f"**{cell.text}**" if cell.best else cell.text for cell in values]
        lines.append([title(row, evaluation.domains), *marked])
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*rows, "", CAPTION, ""])


def csv_table(evaluation: Evaluation) -> str:
    """Unrounded: row, one normalised score a domain, the average, one perplexity a domain."""
    perplexities = results.perplexity_table(evaluation)
    head = ["row", *evaluation.domains, "average"]
    head += [f"perplexity_{domain}" for domain in evaluation.domains]
    lines = [
        [row, *values.values(), scores.average(values), *perplexities[row].values()]
        for row, values in results.normalised_table(evaluation).items()
    ]
    return csv_text(head, lines)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV, floats to the last digit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue()


def align(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first left aligned; a rule under the first line."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([text[0], rule, *text[1:]])


def _number(score: float, deviation: float | None) -> str:
    return f"{score:.1f}" if deviation is None else f"{score:.1f} ± {deviation:.1f}"
