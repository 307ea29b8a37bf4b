"""What HTML pages are made of."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; }
td.best { font-weight: 700; background: #eef4ff; }
p.note { color: #6b7280; font-size: .9rem; } img { max-width: 100%; }
"""


def document(title: str, parts: Iterable[str], *, style: str = STYLE) -> str:
    """A whole page.

    Args:
        title: What the browser's tab says.
        parts: HTML, one below the other; empty ones are left out.
        style: The page's CSS.
    """
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """A table of column titles and of rows: a title and the other cells, which are HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = [f"<tr><td>{escape(title)}</td>{''.join(cells)}</tr>" for title, cells in rows]
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>"


def image(path: Path, text: str) -> str:
    """A PNG, embedded, and what it shows in words."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{data}">'
