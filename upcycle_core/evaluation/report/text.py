"""A report as text: for a terminal, and as Markdown (GitHub's, which MLflow and Prefect show)."""

import re
import textwrap
from collections.abc import Iterable, Sequence

from upcycle_core.evaluation.report.parts import (
    Block,
    Code,
    Figure,
    Heading,
    Notes,
    Report,
    Section,
    Table,
    mark_of,
    text_of,
    walk,
)

WIDTH = 100
"""Characters a line of a sentence; a table is as wide as it is."""


def terminal(sections: Iterable[Section]) -> str:
    """Headings, aligned tables and sentences; without figures and what is for the page only."""
    parts = (_terminal(block) for _, block in walk(sections, brief=True))
    return "\n\n".join(filter(None, parts)) + "\n"


def terminal_table(table: Table) -> str:
    """Columns of equal width, the first left aligned; the best of a column has a star behind it."""
    lines = [[one_line(text_of(value)) for value in row] for row in table.rows]
    for column in range(len(table.header)):
        marks = [mark_of(row[column]) == "best" for row in table.rows]
        if any(marks):
            for line, is_best in zip(lines, marks, strict=True):
                line[column] += "*" if is_best else " "
    lines = [list(map(one_line, table.header)), *lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = (
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )
    return "\n".join([head, "  ".join("-" * width for width in widths), *body])


def one_line(text: str) -> str:
    """``text`` with blanks in the place of line ends: a cell is one line."""
    return " ".join(text.splitlines())


def markdown(sections: Iterable[Section]) -> str:
    """The sections, to be put into another text: headings of the second level and below.

    What is for the page only is left out; the best of a column is bold. A figure is a link to its
    PNG.
    """
    parts = (_markdown(block, level) for level, block in walk(sections, brief=True))
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_page(report: Report) -> str:
    """A whole page: the title, the command that made it, the sections."""
    command = f"Made by\n\n```\n{report.command}\n```\n\n" if report.command else ""
    return f"# {escaped(report.title)}\n\n{command}{markdown(report.sections)}"


def markdown_table(table: Table) -> str:
    """Numbers right aligned, names left; the caption below."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    lines = [list(map(escaped, table.header)), rule, *map(_cells, table.rows)]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{rows}\n\n{escaped(table.caption)}".rstrip()


def escaped(text: str) -> str:
    """``text`` on one line, with nothing in it that ends a cell or that HTML would swallow."""
    return re.sub(r"([\\|<&])", r"\\\1", one_line(text))


def _terminal(block: Block) -> str:
    if isinstance(block, Table):
        return "\n\n".join(filter(None, (terminal_table(block), _wrapped(block.caption))))
    if isinstance(block, Notes):
        return "\n".join(map(_wrapped, block.lines))
    if isinstance(block, Code):
        return block.text.rstrip()
    return _wrapped(block) if isinstance(block, str) else ""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _cells(row: Sequence[object]) -> list[str]:
    marked = ((escaped(text_of(value)), mark_of(value)) for value in row)
    return [f"**{text}**" if mark == "best" else text for text, mark in marked]


def _markdown(block: Block, level: int) -> str:
    if isinstance(block, Heading):
        return f"{'#' * level} {escaped(block)}"
    if isinstance(block, Table):
        return markdown_table(block)
    if isinstance(block, Figure):
        return f"![{escaped(block.title)}]({block.name}.png)\n\n{escaped(block.caption)}".rstrip()
    if isinstance(block, Notes):
        return "\n".join(f"- {escaped(line)}" for line in block.lines)
    if isinstance(block, Code):
        return f"```{block.language}\n{block.text.rstrip()}\n```"
    return block.rstrip() if isinstance(block, str) else ""
