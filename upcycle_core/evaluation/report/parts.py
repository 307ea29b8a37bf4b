"""A report as data: sections of tables, figures and sentences, whatever they will be shown as."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DASH = "–"
"""Stands where nothing was measured."""
Mark = Literal["best", "better", "worse", "chosen"]


@dataclass(frozen=True)
class Cell:
    """A text of a table, and how it stands.

    Args:
        text: What is shown.
        mark: ``best`` of its column; ``better`` or ``worse`` than what it is compared with; of a
            row that was ``chosen``.
    """

    text: str
    mark: Mark | None = None


@dataclass(frozen=True)
class Table:
    """Rows under a header; the first column names the row.

    Args:
        header: Column titles.
        rows: As many values each: cells, or anything else, which people see as ``str`` shows it
            (None as a dash) and a CSV has to the last digit (None as nothing).
        caption: What a reader must know, under the table.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture that is drawn when the report is written.

    Args:
        name: Of its file below the report's folder, without ``.png``.
        title: What it shows, in words, for those who do not see it.
        draw: Writes the PNG.
        data: The numbers that it shows, for a CSV of the same name.
        caption: What a reader must know, under the picture.
    """

    name: str
    title: str
    draw: Callable[[Path], object]
    data: Table | None = None
    caption: str = ""


@dataclass(frozen=True)
class Notes:
    """Sentences that stand each on a line of their own, in small print."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text to copy, such as a recipe; ``language`` is what Markdown calls it."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Section:
    """Blocks under a heading.

    Args:
        heading: Empty for none.
        blocks: Shown one below the other; a section without any is not shown. A text is a
            paragraph; Markdown writes it as it is, so it may hold links.
        page_only: Left out of the short forms, for a terminal and as Markdown.
    """

    heading: str
    blocks: Sequence["Block"]
    page_only: bool = False


Block = str | Table | Figure | Notes | Code | Section


@dataclass(frozen=True)
class Report:
    """What people read.

    Args:
        title: Names the model and what is reported of it.
        sections: One below the other.
        command: The command line that made it; empty where a flow did.
    """

    title: str
    sections: Sequence[Section]
    command: str = ""


class Heading(str):
    """What ``walk`` gives in the place of a section that has one."""


def walk(
    sections: Iterable[Section], *, brief: bool = False, level: int = 2
) -> Iterator[tuple[int, Block]]:
    """Every heading and block in order, with the level of the heading that it stands under.

    Args:
        sections: What is walked, and the sections inside.
        brief: Whether what is for the page only is left out.
        level: Of the outermost headings.
    """
    for section in sections:
        if not section.blocks or (brief and section.page_only):
            continue
        if section.heading:
            yield level, Heading(section.heading)
        for block in section.blocks:
            if isinstance(block, Section):
                yield from walk([block], brief=brief, level=level + 1)
            else:
                yield level, block


def by_columns(
    names: Mapping[str, str],
    columns: Mapping[str, Mapping[str, object]],
    caption: str = "",
    *,
    first: str = "Model",
) -> Table:
    """A table from its columns.

    Args:
        names: {row: its name}, in the order they are shown.
        columns: {title: {row: its cell}}; where a row has none, a dash is shown.
        caption: Of the table.
        first: Title of the column of names.
    """
    rows = [[name, *(own.get(row) for own in columns.values())] for row, name in names.items()]
    return Table([first, *columns], rows, caption)


def text_of(value: object) -> str:
    """What people see of a table's value."""
    if isinstance(value, Cell):
        return value.text
    return DASH if value is None else str(value)


def mark_of(value: object) -> Mark | None:
    """How a table's value stands."""
    return value.mark if isinstance(value, Cell) else None
