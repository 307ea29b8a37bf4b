"""A report as files. The same report gives the same bytes."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from upcycle_core.evaluation.report.page import html_page
from upcycle_core.evaluation.report.parts import Cell, Figure, Report, Section, Table, walk
from upcycle_core.evaluation.report.text import markdown, markdown_page, terminal

METRICS, PAGE = "metrics.json", "report.html"
TEXT, MARKDOWN = "table.txt", "table.md"


def write_report(
    report: Report,
    out: Path,
    *,
    metrics: Mapping[str, object],
    tables: Mapping[str, Table] | None = None,
) -> None:
    """Write everything into one folder.

    ``metrics.json``; ``table.txt`` and ``table.md`` without what is for the page only; every
    figure's PNG with the CSV behind it; ``report.html`` with all of it.

    Args:
        report: What is shown.
        out: The folder; made if it is not there.
        metrics: The content of metrics.json.
        tables: {file name: further numbers, as CSV}.
    """
    write_json(out / METRICS, metrics)
    write_text(out / TEXT, terminal(report.sections))
    write_text(out / MARKDOWN, markdown(report.sections))
    for name, table in (tables or {}).items():
        write_text(out / name, to_csv(table))
    draw_figures(report.sections, out)
    write_text(out / PAGE, html_page(report, out))


def write_markdown_page(report: Report, path: Path) -> None:
    """Write a report as one Markdown file, its figures beside it."""
    draw_figures(report.sections, path.parent)
    write_text(path, markdown_page(report))


def draw_figures(sections: Iterable[Section], out: Path) -> None:
    """Draw every figure into ``out``, with the CSV behind it."""
    for _, figure in walk(sections):
        if not isinstance(figure, Figure):
            continue
        path = out / f"{figure.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.draw(path)
        if figure.data is not None:
            write_text(path.with_suffix(".csv"), to_csv(figure.data))


def to_csv(table: Table) -> str:
    """A table as CSV: floats to the last digit, nothing for None."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.header)
    writer.writerows([_csv_value(value) for value in row] for row in table.rows)
    return out.getvalue()


def write_json(path: Path, values: object) -> None:
    """Write plain values, for people too."""
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file with the same bytes on every system; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def _csv_value(value: object) -> object:
    text = value.text if isinstance(value, Cell) else value
    # A bare carriage return would end the line for readers of CSV.
    return text.replace("\r\n", "\n").replace("\r", "\n") if isinstance(text, str) else text
