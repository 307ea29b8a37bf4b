"""The report of an evaluation: metrics.json, tables, pictures and one page that shows all of it."""

import json
from collections.abc import Mapping
from pathlib import Path

from upcycle_core.errors import raise_faults
from upcycle_core.evaluation.text import page, plots, results, routing, scores, table
from upcycle_core.evaluation.text.results import Evaluation, Parameter

_SWEEP_HEADINGS: dict[Parameter, str] = {
    "window": "Effect of the token window",
    "top_k": "Effect of k",
    "ridge_lambda": "Effect of λ",
}


def write_report(
    evaluation: Evaluation, out: Path, *, more: Mapping[str, Path] | None = None
) -> None:
    """Write the whole report into the directory ``out``; the same evaluation gives the same bytes.

    ``metrics.json``; ``table.md`` and ``table.csv``; ``scores.png``, ``routing.png`` and
    ``sweep_{parameter}.png``, each with the CSV behind it; ``report.html`` with everything.

    Args:
        evaluation: What was measured.
        out: The directory.
        more: {heading: PNG} that the page shows first.

    Raises:
        InputError: rows or numbers are missing; nothing is written.
    """
    raise_faults(results.faults(evaluation))
    out.mkdir(parents=True, exist_ok=True)
    metrics = json.dumps(results.metrics(evaluation), indent=2, ensure_ascii=False, allow_nan=False)
    _write(out / "metrics.json", metrics + "\n")
    _write(out / "table.md", table.markdown_table(evaluation))
    _write(out / "table.csv", table.csv_table(evaluation))
    pictures = {**(more or {}), "Normalised average": _scores(evaluation, out)}
    for parameter, heading in _SWEEP_HEADINGS.items():
        if evaluation.sweeps.get(parameter):
            pictures[heading] = _sweep(evaluation, parameter, out)
    if evaluation.routing:
        pictures["Routing"] = _routing(evaluation, out)
    _write(out / "report.html", page.render(evaluation, pictures))


def _scores(evaluation: Evaluation, out: Path) -> Path:
    averages = _averages(evaluation)
    spread = {row: values["average"] for row, values in results.deviations(evaluation).items()}
    lines = [(row, average, spread.get(row, "")) for row, average in averages.items()]
    head = ["row", "normalised_average", "deviation"]
    _write(out / "scores.csv", table.csv_text(head, lines))
    plots.draw_scores(
        {_title(evaluation, row): average for row, average in averages.items()},
        {_title(evaluation, row): deviation for row, deviation in spread.items()},
        highlight=_title(evaluation, results.best_row(evaluation)),
        path=out / "scores.png",
    )
    return out / "scores.png"


def _sweep(evaluation: Evaluation, parameter: Parameter, out: Path) -> Path:
    points = results.sweep_points(evaluation, parameter)
    lines = [(row, *point) for row, curve in points.items() for point in curve]
    name = f"sweep_{parameter}"
    _write(out / f"{name}.csv", table.csv_text(["row", parameter, "normalised_average"], lines))
    averages = _averages(evaluation)
    plots.draw_sweep(
        parameter,
        {_title(evaluation, row): curve for row, curve in points.items()},
        {
            _title(evaluation, row): averages[row]
            for row in ("oracle", "model_averaging")
            if row in averages
        },
        out / f"{name}.png",
    )
    return out / f"{name}.png"


def _routing(evaluation: Evaluation, out: Path) -> Path:
    counts = results.ordered_routing(evaluation)
    head = ["domain", "layer", "expert", "tokens", "share"]
    _write(out / "routing.csv", table.csv_text(head, routing.records(counts)))
    plots.draw_routing(counts, out / "routing.png")
    return out / "routing.png"


def _averages(evaluation: Evaluation) -> dict[str, float]:
    table_rows = results.normalised_table(evaluation)
    return {row: scores.average(values) for row, values in table_rows.items()}


def _title(evaluation: Evaluation, row: str) -> str:
    return table.title(row, evaluation.domains)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
