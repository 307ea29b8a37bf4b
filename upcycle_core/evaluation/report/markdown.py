"""A report as Markdown (GitHub's, which MLflow and Prefect show too)."""

import re
from collections.abc import Iterable, Iterator, Sequence

from upcycle_core.evaluation.report.parts import (
    Code,
    Figure,
    Notes,
    Report,
    Section,
    Table,
    mark_of,
    text_of,
)
from upcycle_core.evaluation.report.terminal import one_line


def markdown(sections: Iterable[Section]) -> str:
    """The sections, to be put into another text: headings of the second level and below.

    What is for the page only is left out; the best of a column is bold. A figure is a link to its
    PNG.
    """
    return "\n\n".join(part for section in sections for part in _parts(section, 2)) + "\n"


def markdown_page(report: Report) -> str:
    """A whole page: the title, the command that made it, the sections."""
    command = f"Made by\n\n```\n{report.command}\n```\n\n" if report.command else ""
    return f"# {escaped(report.title)}\n\n{command}{markdown(report.sections)}"


def markdown_table(table: Table) -> str:
    """Numbers right aligned, names left; the caption below."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    lines = [list(map(escaped, table.header)), rule, *map(_cells, table.rows)]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{rows}\n\n{escaped(table.caption)}" if table.caption else rows


def escaped(text: str) -> str:
    """``text`` on one line, with nothing in it that ends a cell or that HTML would swallow."""
    return re.sub(r"([\\|<&])", r"\\\1", one_line(text))


def _cells(row: Sequence[object]) -> list[str]:
    marked = ((escaped(text_of(value)), mark_of(value)) for value in row)
    return [f"**{text}**" if mark == "best" else text for text, mark in marked]


def _parts(section: Section, level: int) -> Iterator[str]:
    if section.page_only:
        return
    if section.heading:
        yield f"{'#' * level} {escaped(section.heading)}"
    for block in section.blocks:
        if isinstance(block, Section):
            yield from _parts(block, level + 1)
        elif isinstance(block, Table):
            yield markdown_table(block)
        elif isinstance(block, Figure):
            yield f"![{escaped(block.title)}]({block.name}.png)"
            if block.caption:
                yield escaped(block.caption)
        elif isinstance(block, Notes):
            if block.lines:
                yield "\n".join(f"- {escaped(line)}" for line in block.lines)
        elif isinstance(block, Code):
            yield f"```{block.language}\n{block.text.rstrip()}\n```"
        elif block:
            yield block.rstrip()
