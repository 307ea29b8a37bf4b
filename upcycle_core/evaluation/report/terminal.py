"""A report for a terminal."""

import textwrap
from collections.abc import Iterable, Iterator

from upcycle_core.evaluation.report.parts import Code, Notes, Section, Table, mark_of, text_of

WIDTH = 100
"""Characters a line of a sentence; a table is as wide as it is."""


def terminal(sections: Iterable[Section]) -> str:
    """Headings, aligned tables and sentences; without figures and what is for the page only."""
    return "\n\n".join(part for section in sections for part in _parts(section)) + "\n"


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


def _parts(section: Section) -> Iterator[str]:
    if section.page_only:
        return
    if section.heading:
        yield section.heading
    for block in section.blocks:
        if isinstance(block, Section):
            yield from _parts(block)
        elif isinstance(block, Table):
            yield terminal_table(block)
            if block.caption:
                yield _wrapped(block.caption)
        elif isinstance(block, Notes):
            if block.lines:
                yield "\n".join(map(_wrapped, block.lines))
        elif isinstance(block, Code):
            yield block.text.rstrip()
        elif isinstance(block, str) and block:
            yield _wrapped(block)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
