"""The report on a compression: metrics.json, tables, pictures and one page that shows all of it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.compression import page, plot, results, table
from upcycle_core.evaluation.compression.results import Sweep
from upcycle_core.evaluation.text.table import csv_text


def write_compression_report(
    out: Path,
    sweeps: Sequence[Sweep],
    cosines: Mapping[str, Mapping[str, Any]],
    *,
    tolerance: float,
) -> None:
    """Write the whole report into ``out``; the same sweeps give the same bytes.

    ``metrics.json``; ``table.md``; ``sweep.png`` and ``cosine_{model}.png``, each with the CSV
    behind it (all layers and matrices, not only those that are drawn); ``report.html``.

    Args:
        out: The directory.
        sweeps: One a model, in the order they are shown.
        cosines: {model: what ``cosine_similarities`` gave}.
        tolerance: Percent of a model's own normalised average that the chosen point may lose.

    Raises:
        InputError: Domains or numbers are missing or broken, two models have one name; nothing is
            written.
    """
    raise_faults(_faults(sweeps, cosines))
    out.mkdir(parents=True, exist_ok=True)
    found = {
        "sweeps": {sweep.source: results.metrics(sweep, tolerance) for sweep in sweeps},
        "cosines": {model: dict(values) for model, values in cosines.items()},
    }
    metrics = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)
    _write(out / "metrics.json", metrics + "\n")
    _write(out / "table.md", table.markdown(sweeps, tolerance))
    _write(out / "sweep.csv", table.csv_sweeps(sweeps))
    plot.draw_sweeps(sweeps, tolerance, out / "sweep.png")
    heat_maps = {}
    for model, values in cosines.items():
        heat_maps[model] = out / f"cosine_{_slug(model)}.png"
        _write(heat_maps[model].with_suffix(".csv"), cosine_csv(values))
        plot.draw_cosines(values, heat_maps[model])
    _write(out / "report.html", page.render(sweeps, tolerance, out / "sweep.png", heat_maps))


def cosine_csv(cosines: Mapping[str, Any]) -> str:
    """Every cosine, unrounded: layer, ``ffn`` or one matrix, two names, cosine."""
    names = cosines["names"]
    rows = [
        (layer, what, names[i], names[j], value)
        for layer, whole in cosines["layers"].items()
        for what, square in {"ffn": whole, **cosines["matrices"][layer]}.items()
        for i, row in enumerate(square)
        for j, value in enumerate(row)
    ]
    return csv_text(["layer", "weights", "first", "second", "cosine"], rows)


def _faults(sweeps: Sequence[Sweep], cosines: Mapping[str, Mapping[str, Any]]) -> list[Fault]:
    found = [fault for sweep in sweeps for fault in results.faults(sweep)]
    if not sweeps:
        found.append(Fault("sweeps", None, "nothing to report; compress a model"))
    names = [sweep.source for sweep in sweeps]
    if len(set(names)) < len(names):
        found.append(Fault("sweeps", names, "give every model a name of its own"))
    slugs = [_slug(model) for model in cosines]
    if len(set(slugs)) < len(slugs):
        found.append(Fault("cosines", slugs, "names must differ in letters or digits"))
    return found


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
