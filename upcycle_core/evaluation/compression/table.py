"""A sweep as a table: Markdown and CSV."""

import math
from collections.abc import Iterable, Sequence

from upcycle_core.evaluation.compression import results
from upcycle_core.evaluation.compression.results import Sweep
from upcycle_core.evaluation.text.table import align, csv_text

CAPTION = (
    "Size: all weight files in MB (10^6 bytes), in percent of the original's, and base and deltas "
    "in percent of the experts that they stand for. Average: normalised perplexity on held-out "
    "text, 100 is each domain's own dense expert, higher is better. Change: of the average, "
    "against the original."
)
NOTHING = "–"


def header(sweep: Sweep) -> list[str]:
    """The table's column titles."""
    sizes = ["MB", "% of original", "% of experts"]
    return ["Deltas", "Setting", *sizes, *sweep.domains, "Average", "Change %", "Chosen"]


def lines(sweep: Sweep, tolerance: float) -> list[list[str]]:
    """The table's rows as text: the original, then line by line of the plot, largest first."""
    original = results.original_average(sweep)
    rows = [
        [
            "Original",
            NOTHING,
            f"{sweep.original_bytes / 1e6:.2f}",
            "100.0",
            "100.0",
            *(f"{sweep.original[domain]:.2f}" for domain in sweep.domains),
            f"{original:.2f}",
            NOTHING,
            "",
        ]
    ]
    chosen, found = results.smallest_within(sweep, tolerance), results.averages(sweep)
    for line, names in results.by_series(sweep).items():
        for name in reversed(names):
            point = sweep.points[name]
            rows.append(
                [
                    line,
                    results.setting(point.codec),
                    f"{point.bytes / 1e6:.2f}",
                    f"{results.share(sweep, name):.1f}",
                    f"{results.expert_share(sweep, name):.1f}",
                    *(_perplexity(point.perplexity[domain]) for domain in sweep.domains),
                    f"{found[name]:.2f}",
                    f"{100 * (found[name] / original - 1):+.2f}",
                    "✓" if name == chosen else "",
                ]
            )
    return rows


def format_sweep(sweep: Sweep, tolerance: float) -> str:
    """The table for a terminal."""
    return align([header(sweep), *lines(sweep, tolerance)])


def markdown(sweeps: Iterable[Sweep], tolerance: float) -> str:
    """A section a sweep: its table, and which point is chosen."""
    parts = []
    for sweep in sweeps:
        head = header(sweep)
        table = [head, ["---", "---", *["---:"] * (len(head) - 3), ":---:"]]
        table += lines(sweep, tolerance)
        rows = "\n".join("| " + " | ".join(line) + " |" for line in table)
        parts += [f"## {sweep.source}", rows, verdict(sweep, tolerance)]
    return "\n\n".join([*parts, CAPTION]) + "\n"


def verdict(sweep: Sweep, tolerance: float) -> str:
    """One sentence: the smallest that is good enough, or that none is."""
    name = results.smallest_within(sweep, tolerance)
    within = f"within {tolerance:g} % of the original"
    if name is None:
        return f"Nothing that is smaller than the original is {within}."
    point = sweep.points[name]
    change = 100 * (results.averages(sweep)[name] / results.original_average(sweep) - 1)
    return (
        f"The smallest {within}: {results.series(point.codec)}, "
        f"{results.setting(point.codec)} ({name}), {point.bytes / 1e6:.2f} MB or "
        f"{results.share(sweep, name):.1f} % of it, {change:+.2f} %."
    )


def csv_sweeps(sweeps: Iterable[Sweep]) -> str:
    """Every point, unrounded: what the plot shows."""
    head = ["source", "name", "series", "setting", "bytes", "percent_of_original"]
    rows: list[Sequence[object]] = []
    for sweep in sweeps:
        average = results.original_average(sweep)
        rows.append([sweep.source, "original", "", "", sweep.original_bytes, 100.0, average])
        found = results.averages(sweep)
        for line, names in results.by_series(sweep).items():
            for name in names:
                point = sweep.points[name]
                size = (point.bytes, results.share(sweep, name))
                label = results.setting(point.codec)
                rows.append([sweep.source, name, line, label, *size, found[name]])
    return csv_text([*head, "normalised_average"], rows)


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "∞"
