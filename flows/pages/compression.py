"""Sizes and scores of every way to store deltas, as a page for others to read."""

import json
import shutil
from functools import partial
from pathlib import Path

from flows.pages.page import Command, write_page
from tasks.ders.compression import REPORT, row_title
from tasks.ders.section import section
from upcycle_core.evaluation.report.files import MARKDOWN, METRICS
from upcycle_core.evaluation.report.numbers import slug
from upcycle_core.evaluation.report.parts import Block, Figure, Section

KEYS = ("domains", "seed_model", "experts", "moe", "compression", "baselines")


def write_compression(command: Command, workspace: Path) -> None:
    """Write ``NAME-ders.md``, ``.json`` and the pictures."""
    recipe, report = command.recipe, workspace / "compression" / REPORT
    name, tables = f"{recipe.name}-ders", (report / MARKDOWN).read_text()

    def copied(picture: str, copy: str, title: str) -> Figure:
        return Figure(f"{name}{copy}", title, partial(shutil.copyfile, report / f"{picture}.png"))

    sweep = copied("sweep", "", "Normalised average against size, a line a codec")
    cosines: list[Block] = [
        "Cosine of two FFNs, all of their weights in one vector (the paper's Fig. 1), first and "
        "last layer."
    ]
    for row in section(recipe).models:
        title = row_title(recipe, row)
        cosines.append(copied(f"cosine_{slug(title)}", f"-cosine-{slug(title)}", title))
    write_page(
        command,
        name,
        f"{name}: experts as one base and light deltas",
        [Section("", [sweep, tables]), Section("How alike experts and base are", cosines)],
        keys=KEYS,
        numbers={"recipe": recipe.name, **json.loads((report / METRICS).read_text())},
    )
