"""The report on a compression: sizes and scores of every way, and how alike experts are."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.compression import plot, results
from upcycle_core.evaluation.compression.results import Sweep
from upcycle_core.evaluation.report import files
from upcycle_core.evaluation.report.numbers import number, signed, slug
from upcycle_core.evaluation.report.parts import (
    DASH,
    Cell,
    Figure,
    Report,
    Section,
    Table,
)

CAPTION = (
    "Size: all weight files in MB (10^6 bytes), in percent of the original's, and base and deltas "
    "in percent of the experts that they stand for. Average: normalised perplexity on held-out "
    "text, 100 is each domain's own dense expert, higher is better. Change: of the average, "
    "against the original."
)
COSINES = (
    "Cosine of two FFNs, all of their weights in one vector (Fig. 1 of DeRS): the base that deltas "
    "are taken from, and the experts E1 to EN. Near 1, deltas are small beside the base."
)
Cosines = Mapping[str, Mapping[str, Any]]
"""{model: what ``cosine_similarities`` gave}"""


def write_compression_report(
    out: Path, sweeps: Sequence[Sweep], cosines: Cosines, *, model: str, tolerance: float
) -> None:
    """Write the whole report into ``out``; the same sweeps give the same bytes.

    What ``report.files.write_report`` writes; pictures are ``sweep`` and ``cosine_{model}``, whose
    CSV has all layers and matrices, not only those that are drawn.

    Args:
        out: The directory.
        sweeps: One a model, in the order they are shown.
        cosines: {model: what ``cosine_similarities`` gave}.
        model: What people call the recipe's model.
        tolerance: Percent of a model's own normalised average that the chosen point may lose.

    Raises:
        InputError: Domains or numbers are missing or broken, two models have one name; nothing is
            written.
    """
    raise_faults(_faults(sweeps, cosines))
    title = f"{model}: experts as one base and light deltas"
    metrics = {
        "sweeps": {sweep.source: results.metrics(sweep, tolerance) for sweep in sweeps},
        "cosines": {name: dict(values) for name, values in cosines.items()},
    }
    files.write_report(Report(title, sections(sweeps, cosines, tolerance)), out, metrics=metrics)


def sections(sweeps: Sequence[Sweep], cosines: Cosines, tolerance: float) -> list[Section]:
    """A table and a verdict a model; for the page the pictures."""
    draw = partial(plot.draw_sweeps, sweeps, tolerance)
    title = "Normalised average against size, a line a codec"
    picture = Figure("sweep", title, draw, _sweep_numbers(sweeps, tolerance))
    return [
        Section("Quality against size", [picture], page_only=True),
        *(Section(own.source, [verdict(own, tolerance), table(own, tolerance)]) for own in sweeps),
        Section("", [CAPTION]),
        *(_cosine_section(model, values) for model, values in cosines.items()),
    ]


def table(sweep: Sweep, tolerance: float) -> Table:
    """The original, then line by line of the plot, largest first; the chosen one is marked."""
    found = results.metrics(sweep, tolerance)
    sizes = ["MB", "% of original", "% of experts"]
    header = ["Deltas", "Setting", *sizes, *sweep.domains, "Average", "Change %", "Chosen"]
    whole = [f"{sweep.original_bytes / 1e6:.2f}", "100.0", "100.0"]
    scores = [*sweep.original.values(), found["original"]["normalised_average"]]
    numbers = [number(value, digits=2) for value in scores]
    rows: list[list[object]] = [["Original", DASH, *whole, *numbers, DASH, ""]]
    for line, names in results.by_series(sweep).items():
        for name in reversed(names):
            point, own = sweep.points[name], found["points"][name]
            is_chosen = name == found["chosen"]
            cells = [
                results.setting(point.codec),
                number(point.bytes / 1e6, digits=2),
                number(own["percent_of_original"]),
                number(own["experts_percent_of_original"]),
                *(number(point.perplexity[domain], digits=2) for domain in sweep.domains),
                number(own["normalised_average"], digits=2),
                signed(own["change_percent"], digits=2),
                "✓" if is_chosen else "",
            ]
            rows.append([line, *(Cell(c, "chosen") if is_chosen else c for c in cells)])
    return Table(header, rows)


def verdict(sweep: Sweep, tolerance: float) -> str:
    """One sentence: the smallest that is good enough, or that none is."""
    found = results.metrics(sweep, tolerance)
    name, within = found["chosen"], f"within {tolerance:g} % of the original"
    if name is None:
        return f"Nothing that is smaller than the original is {within}."
    own, codec = found["points"][name], sweep.points[name].codec
    return (
        f"The smallest {within}: {results.series(codec)}, {results.setting(codec)} ({name}), "
        f"{number(own['bytes'] / 1e6, digits=2)} MB or {number(own['percent_of_original'])} % of "
        f"it, {signed(own['change_percent'], digits=2)} %."
    )


def cosine_numbers(cosines: Mapping[str, Any]) -> Table:
    """Every cosine, unrounded: layer, ``ffn`` or one matrix, two names, cosine."""
    names = cosines["names"]
    rows = [
        (layer, what, names[i], names[j], value)
        for layer, whole in cosines["layers"].items()
        for what, square in {"ffn": whole, **cosines["matrices"][layer]}.items()
        for i, row in enumerate(square)
        for j, value in enumerate(row)
    ]
    return Table(["layer", "weights", "first", "second", "cosine"], rows)


def _cosine_section(model: str, values: Mapping[str, Any]) -> Section:
    heading = f"How alike experts and base are: {model}"
    draw = partial(plot.draw_cosines, values)
    figure = Figure(f"cosine_{slug(model)}", heading, draw, cosine_numbers(values), COSINES)
    return Section(heading, [figure], page_only=True)


def _sweep_numbers(sweeps: Sequence[Sweep], tolerance: float) -> Table:
    """Every point, unrounded: what the plot shows."""
    header = ["source", "name", "series", "setting", "bytes", "percent_of_original"]
    rows: list[Sequence[object]] = []
    for sweep in sweeps:
        found = results.metrics(sweep, tolerance)
        average = found["original"]["normalised_average"]
        rows.append([sweep.source, "original", "", "", sweep.original_bytes, 100.0, average])
        for line, names in results.by_series(sweep).items():
            for name in names:
                own, label = found["points"][name], results.setting(sweep.points[name].codec)
                size = (own["bytes"], own["percent_of_original"])
                rows.append([sweep.source, name, line, label, *size, own["normalised_average"]])
    return Table([*header, "normalised_average"], rows)


def _faults(sweeps: Sequence[Sweep], cosines: Cosines) -> list[Fault]:
    found = [fault for sweep in sweeps for fault in results.faults(sweep)]
    if not sweeps:
        found.append(Fault("sweeps", None, "nothing to report; compress a model"))
    names = [sweep.source for sweep in sweeps]
    if len(set(names)) < len(names):
        found.append(Fault("sweeps", names, "give every model a name of its own"))
    slugs = [slug(model) for model in cosines]
    if len(set(slugs)) < len(slugs):
        found.append(Fault("cosines", slugs, "names must differ in letters or digits"))
    return found
