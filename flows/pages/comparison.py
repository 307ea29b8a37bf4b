"""The page of a comparison: means and deviations over seeds, a plot, the command."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from flows.pages.page import Command, write_page
from infra.recipe.schema import Recipe, recipe_yaml, resolve
from upcycle_core.evaluation.report.numbers import number
from upcycle_core.evaluation.report.parts import Figure, Notes, Section, Table
from upcycle_core.evaluation.text.comparison import across_seeds
from upcycle_core.evaluation.text.comparison_report import (
    Rows,
    comparison_blocks,
    comparison_table,
    draw_comparison,
)

FOLDER = "compared"
"""In the workspace: the comparison with what its rows cost on this machine."""
BESIDE = {
    "folder",
    "seed",
    "baselines",
    "comparison",
    "tasks",
    "task_evaluation",
    "compression",
    "registry",
    "compute",
    "versions",
    "verify",
    "keep",
    "lineage",
}
"""Sections of a recipe that its model's scores do not hang on, or that are compared as seeds."""
PERPLEXITY = "Perplexity itself, by the models' own tokenizer; lower is better."
ROWS, TABLE = f"{FOLDER}/rows.json", f"{FOLDER}/table.txt"


def write_comparison(command: Command, runs: Sequence[Rows]) -> None:
    """Write ``NAME-comparison.md``, ``.json`` and ``.png`` of what each run left in ``ROWS``."""
    recipe, rows = command.recipe, across_seeds(runs)
    name, seeds = f"{recipe.name}-comparison", list(command.seeds) or [recipe.seed]
    scores = comparison_blocks(rows, seeds=len(runs), tokens=recipe.comparison.tokens)
    draw = partial(draw_comparison, rows, highlight="dume")
    figure = Figure(name, "Score against compute", draw)
    write_page(
        command,
        name,
        f"{recipe.name}: ways of upcycling on equal terms",
        [
            Section("", [*scores, figure, Notes(statement(rows, recipe))]),
            Section("Perplexity", [_perplexities(runs)]),
        ],
        keys=("comparison", "baselines"),
        numbers={
            "recipe": recipe.name,
            "made_of": _made_of(recipe),
            "seeds": seeds,
            "rows": rows,
            "runs": list(runs),
        },
    )


def _perplexities(runs: Sequence[Rows]) -> Table:
    """The mean over seeds, which no weak expert makes better."""
    domains = list(next(iter(runs[0].values()))["perplexity"])
    rows = [
        [
            own["title"],
            *(number(fmean(run[row]["perplexity"][d] for run in runs), digits=2) for d in domains),
        ]
        for row, own in runs[0].items()
    ]
    return Table(["Method", *domains], rows, PERPLEXITY)


def _made_of(recipe: Recipe) -> str:
    """sha256 of what decides the scores of the recipe's model, whatever it is compared with."""
    keys = [key for key in resolve(recipe) if key not in BESIDE]
    return hashlib.sha256(recipe_yaml(recipe, keys).encode()).hexdigest()


def comparison_section(command: Command) -> list[Section]:
    """The comparison's table for another page of the same recipe and seeds, if there is one.

    That page says itself what the backbone and the routers cost. One of another recipe or of other
    seeds is said, and left out.
    """
    path = command.out / f"{command.recipe.name}-comparison.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    own = _made_of(command.recipe)
    if (found.get("made_of", own), sorted(found["seeds"])) != (own, sorted(command.seeds)):
        print(f"{path}: of another recipe or other seeds, left out; run flows.compare again")
        return []
    table = comparison_table(found["rows"], seeds=len(found["seeds"]))
    return [Section("Against training", [table, f"More in [{path.stem}.md]({path.stem}.md)."])]


def statement(rows: Mapping[str, Mapping[str, Any]], recipe: Recipe) -> list[str]:
    """DUME without training against BTX with it, as it comes out."""
    dume = rows["dume"]["scores"]["average"][0]
    lines = []
    for name, row in recipe.baselines.items():
        if row.method == "btx":
            other = rows[name]["scores"]["average"][0]
            lines.append(
                f"DUME, which trains nothing after the experts, reaches {dume:.1f}; "
                f"{rows[name]['title']}, trained, {other:.1f} ({dume - other:+.1f} for DUME)."
            )
    return lines
