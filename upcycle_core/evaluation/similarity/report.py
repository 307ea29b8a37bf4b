"""The report on how alike experts are: metrics, CSV, pictures and a page in plain words."""

import json
from pathlib import Path

from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.similarity.page import markdown
from upcycle_core.evaluation.similarity.plot import draw_layers, draw_pairs
from upcycle_core.evaluation.similarity.results import SimilarityReport


def write_report(report: SimilarityReport, out: Path) -> None:
    """Write ``similarity.json``, ``.csv``, ``.md``, ``.png`` and a PNG of pairs a representation.

    The same report gives the same bytes.

    Raises:
        InputError: A stage compares nothing; nothing is written.
    """
    empty = [key for key, stage in report.stages.items() if not stage.pairs]
    if empty or not report.stages:
        raise InputError(Fault("stages", empty, "nothing is compared; give two experts or more"))
    out.mkdir(parents=True, exist_ok=True)
    metrics = json.dumps(report.metrics(), indent=2, ensure_ascii=False, allow_nan=False)
    _write(out / "similarity.json", metrics + "\n")
    _write(out / "similarity.csv", report.csv())
    _write(out / "similarity.md", markdown(report))
    draw_layers(report, out / "similarity.png")
    for representation in report.representations():
        draw_pairs(report, representation, out / f"similarity_{representation}.png")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
