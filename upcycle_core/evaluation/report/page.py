"""A report as one self-contained HTML page: no script, nothing fetched, readable on a phone."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from upcycle_core.evaluation.report.parts import (
    Block,
    Code,
    Figure,
    Heading,
    Notes,
    Report,
    Table,
    mark_of,
    text_of,
    walk,
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 76rem; margin: 2rem auto;
       padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p.note, ul.note { color: #6b7280; font-size: .9rem; } ul.note { padding-left: 1.2rem; }
p, ul { max-width: 62rem; }
/* What is wider than the window scrolls by itself; a shadow at the edge says that there is more. */
div.table, figure, pre { overflow-x: auto; margin: 0 0 .8rem; }
div.table { background:
  linear-gradient(to left, #fff 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, #b8bec9, transparent) right / .6rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
th { vertical-align: bottom; } td { vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
td:first-child { white-space: normal; min-width: 10rem; }
td.text, th.text { text-align: left; }
td.text { font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12rem; }
td.best, td.chosen { font-weight: 700; background: #eef4ff; }
td.better { background: #e9f7ec; } td.worse { background: #fdeeee; }
img { display: block; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 .8rem; }
  td:first-child { min-width: 6rem; max-width: 9rem; }
}
"""
SCALE = 0.6
"""Of a picture on the page: its text is then a little smaller than the page's."""
LONG = 60
"""Characters of a table's text from which on its column is a column of texts, which wrap."""


def html_page(report: Report, folder: Path) -> str:
    """The whole page, with its pictures inside it.

    Args:
        report: What is shown.
        folder: Where the PNG files of its figures are.
    """
    title = escape(report.title)
    command = f"<p>Made by</p>\n<pre>{escape(report.command)}</pre>" if report.command else ""
    parts = [_text(block, level, folder) for level, block in walk(report.sections)]
    body = "\n".join(filter(None, [f"<h1>{title}</h1>", command, *parts]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def stamped(page: str, facts: Sequence[str], cost: str = "") -> str:
    """A page with what its artifact may not depend on: version, date and commit, under the title.

    Args:
        page: What ``html_page`` gave.
        facts: What is said, in order.
        cost: A sentence on what it took, below them.
    """
    words = escape(" · ".join(facts))
    page = page.replace("</title>", f" · {words}</title>", 1)
    below = f'\n<p class="note">{escape(cost)}</p>' if cost else ""
    return page.replace("</h1>", f'</h1>\n<p class="note">{words}</p>{below}', 1)


def _text(block: Block, level: int, folder: Path) -> str:
    if isinstance(block, Heading):
        return f"<h{level}>{escape(block)}</h{level}>"
    if isinstance(block, Table):
        return _table(block) + _note(block.caption)
    if isinstance(block, Figure):
        return _image(folder / f"{block.name}.png", block.title) + _note(block.caption)
    if isinstance(block, Notes):
        lines = "".join(f"<li>{escape(line)}</li>" for line in block.lines)
        return lines and f'<ul class="note">{lines}</ul>'
    if isinstance(block, Code):
        return f"<pre>{escape(block.text)}</pre>"
    return f"<p>{escape(block)}</p>" if isinstance(block, str) else ""


def _image(path: Path, title: str) -> str:
    png = path.read_bytes()
    width = round(SCALE * int.from_bytes(png[16:20]))  # what the header of a PNG says
    data = base64.b64encode(png).decode()
    source = f"data:image/png;base64,{data}"
    return f'<figure><img alt="{escape(title)}" width="{width}" src="{source}"></figure>'


def _note(text: str) -> str:
    return text and f'\n<p class="note">{escape(text)}</p>'


def _table(table: Table) -> str:
    is_text = [place > 0 and any(map(_is_long, c)) for place, c in enumerate(_columns(table))]
    # Long names may break behind an underscore: a dozen of them fit beside each other.
    cells = [
        f"<th{_class('text' if text else '')}>{escape(name).replace('_', '_<wbr>')}</th>"
        for name, text in zip(table.header, is_text, strict=True)
    ]
    lines = ["".join(cells)]
    for row in table.rows:
        cells = [
            f"<td{_class(mark_of(value) or ('text' if text else ''))}>{escape(text_of(value))}</td>"
            for value, text in zip(row, is_text, strict=True)
        ]
        lines.append("".join(cells))
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table>\n{rows}\n</table></div>'


def _columns(table: Table) -> Sequence[Sequence[object]]:
    return [[row[place] for row in table.rows] for place in range(len(table.header))]


def _is_long(value: object) -> bool:
    text = text_of(value)
    return len(text) > LONG or "\n" in text


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
