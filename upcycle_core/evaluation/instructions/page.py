"""The report on instructions as one self-contained HTML page: nothing fetched, no script."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.instructions import table
from upcycle_core.evaluation.instructions.table import Table
from upcycle_core.evaluation.text.page import STYLE, document, html_table, image

_STYLE = (
    STYLE
    + """body { max-width: 76rem; } th, td { padding: .25rem .6rem; }
td { white-space: nowrap; } th { vertical-align: bottom; }
div.wide { overflow-x: auto; margin-bottom: .8rem; }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff; white-space: nowrap; }
"""
)


def render(rows: Mapping[str, Any], pictures: Mapping[str, tuple[Path, str]]) -> str:
    """The page.

    Args:
        rows: What ``results.metrics`` gave.
        pictures: {heading: (PNG, what it shows)}, in the order they are shown under the tables.

    Returns:
        HTML with the pictures embedded.
    """
    parts = ["<h1>Answers to instructions</h1>"]
    for shown in table.tables(rows):
        parts += [f"<h2>{escape(shown.heading)}</h2>", _html(shown)]
    parts += [_note(text) for text in (table.CAPTION, *table.notes(rows))]
    for heading, (path, words) in pictures.items():
        parts += [f"<h2>{escape(heading)}</h2>", image(path, heading), _note(words)]
    return document("Answers to instructions", parts, style=_STYLE)


def _html(shown: Table) -> str:
    lines = []
    for title, cells in shown.lines:
        marks = [' class="best"' if cell.best else "" for cell in cells]
        texts = [escape(cell.text) for cell in cells]
        pairs = zip(marks, texts, strict=True)
        lines.append((title, [f"<td{mark}>{text}</td>" for mark, text in pairs]))
    # Long names may break behind an underscore: a dozen categories fit beside each other.
    opening, head, rest = html_table(shown.header, lines).split("\n", 2)
    return f'<div class="wide">{opening}\n{head.replace("_", "_<wbr>")}\n{rest}</div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
