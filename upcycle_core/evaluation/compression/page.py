"""The report on a compression as one self-contained HTML page."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from upcycle_core.evaluation.compression import table
from upcycle_core.evaluation.compression.results import Sweep
from upcycle_core.evaluation.text.page import STYLE, document, html_table, image

_STYLE = STYLE + "td:nth-child(2) { text-align: left; }\n"
COSINES = (
    "Cosine of two FFNs, all of their weights in one vector (Fig. 1 of DeRS): the base that deltas "
    "are taken from, and the experts E1 to EN. Near 1, deltas are small beside the base."
)


def render(
    sweeps: Sequence[Sweep], tolerance: float, plot: Path, heat_maps: Mapping[str, Path]
) -> str:
    """The page.

    Args:
        sweeps: What is shown, a table each.
        tolerance: Percent of the original's average that the chosen one may lose.
        plot: PNG of all sweeps.
        heat_maps: {model: PNG of its cosines}.

    Returns:
        HTML with the pictures embedded.
    """
    parts = [
        "<h1>Experts as one base and light deltas</h1>",
        "<h2>Quality against size</h2>",
        image(plot, "Normalised average against size, a line a codec"),
    ]
    for sweep in sweeps:
        verdict = table.verdict(sweep, tolerance)
        parts += [f"<h2>{escape(sweep.source)}</h2>", f"<p>{escape(verdict)}</p>"]
        parts.append(_table(sweep, tolerance))
    parts.append(f'<p class="note">{escape(table.CAPTION)}</p>')
    for model, path in heat_maps.items():
        heading = f"How alike experts and base are: {model}"
        parts += [f"<h2>{escape(heading)}</h2>", image(path, heading)]
    if heat_maps:
        parts.append(f'<p class="note">{escape(COSINES)}</p>')
    return document("Compression", parts, style=_STYLE)


def _table(sweep: Sweep, tolerance: float) -> str:
    rows = []
    for title, *cells in table.lines(sweep, tolerance):
        mark = ' class="best"' if cells[-1] else ""
        rows.append((title, [f"<td{mark}>{escape(cell)}</td>" for cell in cells]))
    return html_table(table.header(sweep), rows)
