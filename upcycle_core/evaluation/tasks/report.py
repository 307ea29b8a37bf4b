"""The report on tasks: metrics.json, tables, a picture, every item, one page that shows it all."""

import json
from pathlib import Path

from upcycle_core.errors import raise_faults
from upcycle_core.evaluation.tasks import page, plot, results, table
from upcycle_core.evaluation.tasks.items import write_models
from upcycle_core.evaluation.tasks.results import TaskEvaluation


def write_task_report(evaluation: TaskEvaluation, out: Path) -> None:
    """Write the whole report into the directory ``out``; the same evaluation gives the same bytes.

    ``metrics.json``; ``table.txt`` and ``table.md``; ``scores.png`` and ``scores.csv``;
    ``report.html`` with everything. Where items are known: ``items.parquet`` with all of them, and
    ``won-and-lost.csv`` where there are rivals too.

    Raises:
        InputError: Rows or numbers are missing, or the subject and a rival were not asked the same;
            nothing is written.
    """
    raise_faults(results.faults(evaluation))
    found, flips = results.metrics(evaluation), results.flips(evaluation)
    out.mkdir(parents=True, exist_ok=True)
    metrics = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)
    _write(out / "metrics.json", metrics + "\n")
    _write(out / "table.txt", table.format_tasks(found))
    _write(out / "table.md", table.markdown_tasks(found))
    _write(out / "scores.csv", table.csv_scores(found))
    if any(evaluation.items.values()):
        write_models(evaluation.items, out / "items.parquet")
        if evaluation.rivals:
            _write(out / "won-and-lost.csv", table.csv_flips(flips))
    plot.draw_tasks(found, out / "scores.png")
    _write(out / "report.html", page.render(found, flips, out / "scores.png"))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
