"""The page of one recipe with several seeds: means and deviations."""

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from flows.pages import joining
from flows.pages.comparison import PERPLEXITY, comparison_section
from flows.pages.page import Command, write_page
from infra.recipe.schema import Recipe
from tasks.engine.costs import read_cost
from tasks.engine.workspace import Workspace
from tasks.methods import METHODS
from upcycle_core.evaluation.report.numbers import number
from upcycle_core.evaluation.report.parts import DASH, Block, Figure, Section, Table
from upcycle_core.evaluation.text.plots import REFERENCES, draw_scores, draw_sweep
from upcycle_core.evaluation.text.report import UNSCORED
from upcycle_core.evaluation.text.results import Parameter, gaps, title_of
from upcycle_core.evaluation.text.scores import across_runs, mean_and_deviation

SWEEPS: dict[Parameter, str] = {
    "window": "Token window (Figure 2a)",
    "top_k": "k (Figure 2b)",
    "ridge_lambda": "λ (Figure 2c)",
}
KEYS = ("tokenizer", "seed_model", "experts", "statistics", "router", "moe", "evaluation")
Spread = Mapping[str, Mapping[str, tuple[float, float]]]
"""{row: {domain or "average": mean and deviation}}"""


def write_seeds(command: Command, workspaces: Sequence[Path]) -> None:
    """Write ``NAME.md``, ``NAME.json`` and ``NAME/*.png`` of finished runs."""
    recipe, name, seeds = command.recipe, command.recipe.name, command.seeds
    count = len(seeds)
    runs = [json.loads((own / "report" / "metrics.json").read_text()) for own in workspaces]
    costs = [_core_seconds(recipe, Workspace(own)) for own in workspaces]
    joined = [joining.core_seconds(recipe, Workspace(own)) for own in workspaces]
    scores = across_runs([_with_average(run) for run in runs])
    sweeps = {p: _sweep_mean(runs, p) for p in SWEEPS if p in runs[0]["sweeps"]}
    agreement = mean_and_deviation([run["routing"]["agreement"] for run in runs])
    first = partial(shutil.copyfile, workspaces[0] / "report" / "routing.png")
    routing = Figure(f"{name}/routing", "Routing", first)
    whole = {row: own["average"] for row, own in scores.items() if "average" in own}
    averages = {title_of(row, recipe.domains): average for row, average in whole.items()}
    draw = partial(draw_scores, averages, title_of("dume", ()))
    shown: list[Block] = [
        _table(recipe, scores, count),
        *gaps({row: mean for row, (mean, _) in whole.items()}),
        Figure(f"{name}/scores", "Normalised averages", draw),
        f"{_costs(agreement, costs, count)} {joining.sentence(*joined)}".strip(),
    ]
    pictures = [Section(SWEEPS[p], [_sweep(recipe, scores, p, sweeps[p])]) for p in sweeps]
    write_page(
        command,
        name,
        f"{name}: {len(recipe.domains)} domains, {count} seed{'s' if count > 1 else ''}",
        [
            Section("", shown),
            Section("Perplexity", [_perplexities(recipe, runs)]),
            *comparison_section(command),
            Section("Routing", ["First seed; rows are domains, columns experts.", routing]),
            Section("What the choices do", pictures),
        ],
        keys=KEYS,
        numbers={
            "recipe": name,
            "seeds": list(seeds),
            "normalised": {
                row: {column: {"mean": m, "deviation": d} for column, (m, d) in columns.items()}
                for row, columns in scores.items()
            },
            "routing_agreement": {"mean": agreement[0], "deviation": agreement[1]},
            "sweeps": sweeps,
            "core_seconds": [own and sum(own.values()) for own in costs],
            "core_seconds_joining": joined,
            "machine": {"system": platform.platform(), "python": platform.python_version()},
            "runs": runs,
        },
    )


def _perplexities(recipe: Recipe, runs: Sequence[Mapping[str, Any]]) -> Table:
    """The mean over seeds."""
    rows = [
        [
            title_of(row, recipe.domains),
            *(
                number(fmean(run["perplexity"][row][d] for run in runs), digits=2)
                if d in own
                else DASH
                for d in recipe.domains
            ),
        ]
        for row, own in runs[0]["perplexity"].items()
    ]
    return Table(["Method", *recipe.domains], rows, PERPLEXITY)


def _core_seconds(recipe: Recipe, workspace: Workspace) -> dict[str, float] | None:
    """{stage: time times cores of what made its part of the model}, in whichever run that was; None
    where some of it was made elsewhere, as given experts are."""
    if any(domain.expert is not None for domain in recipe.domains.values()):
        return None
    found: dict[str, float] = {}
    for stage in METHODS[recipe.method].stages():
        for item in stage.items(recipe):
            if (cost := read_cost(workspace, stage.label(item))) is None:
                return None
            found[stage.name] = found.get(stage.name, 0.0) + cost.core_seconds
    return found


def _costs(
    agreement: tuple[float, float], costs: Sequence[Mapping[str, float] | None], count: int
) -> str:
    percent = number(100 * agreement[0], 100 * agreement[1] if count > 1 else None)
    sent = f"The routers send {percent} % of the tokens to the expert of the text's domain (mean "
    sent += "over layers and domains)."
    known = [own for own in costs if own is not None and any(own.values())]
    if not known:
        return sent
    router = 100 * max(own["router"] / sum(own.values()) for own in known)
    minutes = ", ".join(f"{sum(own.values()) / 60:.0f}" if own else DASH for own in costs)
    return (
        f"{sent} Solving them took {router:.2f} % of a model's core time or less; a model took "
        f"{minutes} core minutes, evaluation included."
    )


def _with_average(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Normalised scores; experts that were not scored on all domains have no average."""
    averages = run["normalised_average"]
    return {
        row: {**scores, **({"average": averages[row]} if row in averages else {})}
        for row, scores in run["normalised"].items()
    }


def _sweep_mean(
    runs: Sequence[Mapping[str, Any]], parameter: str
) -> dict[str, list[tuple[float, float]]]:
    """Normalised average at each value, mean over seeds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in runs[0]["sweeps"][parameter]:
        for points in zip(*(run["sweeps"][parameter][row] for run in runs), strict=True):
            average = fmean(point["normalised_average"] for point in points)
            found.setdefault(row, []).append((points[0]["value"], average))
    return found


def _table(recipe: Recipe, scores: Spread, count: int) -> Table:
    columns = [*recipe.domains, "average"]
    rows = [
        [title_of(row, recipe.domains), *(_cell(cells.get(name), count) for name in columns)]
        for row, cells in scores.items()
    ]
    spread = f", mean ± standard deviation over {count} seeds" if count > 1 else ""
    caption = (
        "Perplexity on held-out text in percent of each domain's own dense expert (the paper's "
        f"normalised score){spread}. The oracle is told the domain; the others are not."
    )
    if any(cells.keys() != {*columns} for cells in scores.values()):
        caption += UNSCORED
    return Table(["Method", *columns], rows, caption)


def _cell(value: tuple[float, float] | None, count: int) -> str:
    if value is None:
        return DASH
    return number(value[0], value[1] if count > 1 else None)


def _sweep(
    recipe: Recipe,
    scores: Spread,
    parameter: Parameter,
    curves: Mapping[str, Sequence[tuple[float, float]]],
) -> Figure:
    draw = partial(
        draw_sweep,
        parameter,
        {title_of(row, recipe.domains): points for row, points in curves.items()},
        {title_of(row, ()): scores[row]["average"][0] for row in REFERENCES if row in scores},
    )
    return Figure(f"{recipe.name}/sweep_{parameter}", SWEEPS[parameter], draw)
