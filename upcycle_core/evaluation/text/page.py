"""The report as one self-contained HTML page: tables and pictures, no script, nothing fetched."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from upcycle_core.evaluation.text import results, table
from upcycle_core.evaluation.text.results import Evaluation

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


def render(evaluation: Evaluation, pictures: Mapping[str, Path]) -> str:
    """The page.

    Args:
        evaluation: What is shown.
        pictures: {heading: PNG}, in the order they are shown under the tables.

    Returns:
        HTML with the pictures embedded.
    """
    parts = [
        "<h1>Evaluation on held-out text</h1>",
        "<h2>Normalised perplexity</h2>",
        _score_table(evaluation),
        f'<p class="note">{escape(table.CAPTION)}</p>',
        "<h2>Perplexity</h2>",
        _perplexity_table(evaluation),
        _text_note(evaluation),
    ]
    for heading, path in pictures.items():
        parts += [f"<h2>{escape(heading)}</h2>", image(path, heading)]
    parts.append(_agreement_note(evaluation))
    return document("Evaluation", parts)


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


def _score_table(evaluation: Evaluation) -> str:
    rows = []
    for row, cells in table.cells(evaluation).items():
        marked = [
            f'<td class="best">{cell.text}</td>' if cell.best else f"<td>{cell.text}</td>"
            for cell in cells
        ]
        rows.append((table.title(row, evaluation.domains), marked))
    return html_table(table.header(evaluation), rows)


def _perplexity_table(evaluation: Evaluation) -> str:
    rows = [
        (table.title(row, evaluation.domains), [f"<td>{p:.2f}</td>" for p in values.values()])
        for row, values in results.perplexity_table(evaluation).items()
    ]
    return html_table(["Method", *evaluation.domains], rows)


def _text_note(evaluation: Evaluation) -> str:
    if not evaluation.heldout:
        return ""
    sizes = ", ".join(
        f"{escape(domain)} {evaluation.heldout[domain]['tokens']:,.0f}"
        for domain in evaluation.domains
    )
    return f'<p class="note">Scored tokens: {sizes}.</p>'


def _agreement_note(evaluation: Evaluation) -> str:
    routing = results.routing_summary(evaluation)
    if not routing:
        return ""
    layers = ", ".join(f"{100 * share:.1f}" for share in routing["agreement_by_layer"])
    agreement, chance = 100 * routing["agreement"], 100 / len(evaluation.domains)
    return (
        f'<p class="note">Routers agree with the domain label on {agreement:.1f} % of tokens '
        f"(layer by layer: {layers}); chance is {chance:.1f} %.</p>"
    )
