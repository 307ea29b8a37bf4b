"""One recipe with several seeds, and a page with means and deviations.

``python -m flows.seeds recipes/five-domains.yaml --seeds 0 1 2 --out docs/results --set folder=F``

Each seed is a whole run of the flow in a workspace of its own (``NAME-seed-0``, ...), so what is
finished is not run again.
"""

import json
import math
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.pages.comparison import comparison_section
from flows.running.command_line import command, load, recipe_parser
from infra import settings as environment
from infra.recipe.schema import Recipe, recipe_yaml
from infra.services.stopping import run_command
from tasks.engine.sources import CODE
from upcycle_core.evaluation.text.plots import draw_scores, draw_sweep
from upcycle_core.evaluation.text.results import Parameter
from upcycle_core.evaluation.text.scores import across_runs, mean_and_deviation
from upcycle_core.evaluation.text.table import title

SWEEPS: tuple[Parameter, ...] = ("window", "top_k", "ridge_lambda")
SWEEP_TITLES = {
    "window": "Token window (Figure 2a)",
    "top_k": "k (Figure 2b)",
    "ridge_lambda": "λ (Figure 2c)",
}

SHOWN_KEYS = ("tokenizer", "seed_model", "experts", "statistics", "router", "moe", "evaluation")
PAGE = """\
# {name}: {domains} domains, {count} seeds

Made by

```
python -m flows.seeds {source} --seeds {seeds} --out docs/results{folder}
```

Perplexity on held-out text in percent of each domain's own dense expert (the paper's normalised
score), mean ± standard deviation over {count} seeds. The oracle is told the domain; the others are
not.

{table}

![Normalised averages]({name}/scores.png)

The routers send {agreement} % of the tokens to the expert of the text's domain (mean over layers
and domains). Solving them took {router:.2f} % of a run's time or less; a run took {minutes}
minutes.

{comparison}## Routing

First seed; rows are domains, columns experts.

![Routing]({name}/routing.png)

## What the choices do

{sweeps}

Every number, each seed's too, is in [{name}.json]({name}.json).

## The recipe

```yaml
{recipe}
```
"""


@command
def main(arguments: list[str] | None = None) -> None:
    """Run every seed, then write ``NAME.md``, ``NAME.json`` and pictures."""
    parser = recipe_parser("flows.seeds", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="folder for the page")
    chosen = parser.parse_args(arguments)
    home = environment.configure().home
    recipe = load(chosen)
    workspaces = []
    for seed in chosen.seeds:
        name = f"{recipe.name}-seed-{seed}"
        changes = [*chosen.set, f"seed={seed}", f"name={name}"]
        options = [part for change in changes for part in ("--set", change)]
        if chosen.add:
            options += ["--add", *(str(path.resolve()) for path in chosen.add)]
        words = [sys.executable, "-m", "flows.dume", str(chosen.recipe.resolve()), *options]
        run_command(words, directory=CODE)
        workspaces.append(home / name)
    write_page(recipe, chosen.recipe, chosen.seeds, workspaces, chosen.out)


def write_page(
    recipe: Recipe, source: Path, seeds: Sequence[int], workspaces: Sequence[Path], out: Path
) -> None:
    """Write the page of finished runs.

    Args:
        recipe: What was run.
        source: The recipe's file, as named in the command.
        seeds: Its seeds.
        workspaces: Their workspaces.
        out: Folder for ``NAME.md``, ``NAME.json`` and ``NAME/*.png``.
    """
    runs = [json.loads((w / "report" / "metrics.json").read_text()) for w in workspaces]
    timings = [json.loads((w / "timings.json").read_text()) for w in workspaces]
    pictures = out / recipe.name
    pictures.mkdir(parents=True, exist_ok=True)
    table = across_runs([_with_average(run) for run in runs])
    sweeps = {p: _sweep_mean(runs, p) for p in SWEEPS if p in runs[0]["sweeps"]}
    agreement = mean_and_deviation([run["routing"]["agreement"] for run in runs])
    shutil.copyfile(workspaces[0] / "report" / "routing.png", pictures / "routing.png")
    _draw(recipe, table, sweeps, pictures)
    result = {
        "recipe": recipe.name,
        "seeds": list(seeds),
        "normalised": {
            row: {column: {"mean": m, "deviation": d} for column, (m, d) in columns.items()}
            for row, columns in table.items()
        },
        "routing_agreement": {"mean": agreement[0], "deviation": agreement[1]},
        "sweeps": sweeps,
        "seconds": [timing["wall"] for timing in timings],
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "runs": runs,
    }
    (out / f"{recipe.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = _page(recipe, source, seeds, table, agreement, timings, list(sweeps), out)
    (out / f"{recipe.name}.md").write_text(page)


def _with_average(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        row: {**scores, "average": run["normalised_average"][row]}
        for row, scores in run["normalised"].items()
    }


def _sweep_mean(
    runs: Sequence[Mapping[str, Any]], parameter: str
) -> dict[str, list[tuple[float, float]]]:
    """Normalised average at each value, mean over seeds."""
    return {
        row: [
            (
                point["value"],
                math.fsum(run["sweeps"][parameter][row][i]["normalised_average"] for run in runs)
                / len(runs),
            )
            for i, point in enumerate(points)
        ]
        for row, points in runs[0]["sweeps"][parameter].items()
    }


def _draw(
    recipe: Recipe,
    table: Mapping[str, Mapping[str, tuple[float, float]]],
    sweeps: Mapping[Parameter, Mapping[str, Sequence[tuple[float, float]]]],
    pictures: Path,
) -> None:
    names = {row: title(row, recipe.domains) for row in table}
    draw_scores(
        {names[row]: columns["average"][0] for row, columns in table.items()},
        {names[row]: columns["average"][1] for row, columns in table.items()},
        highlight=names["dume"],
        path=pictures / "scores.png",
    )
    references = {
        names[row]: table[row]["average"][0]
        for row in ("oracle", "model_averaging")
        if row in table
    }
    for parameter, rows in sweeps.items():
        curves = {names[row]: points for row, points in rows.items()}
        draw_sweep(parameter, curves, references, pictures / f"sweep_{parameter}.png")


def _page(
    recipe: Recipe,
    source: Path,
    seeds: Sequence[int],
    table: Mapping[str, Mapping[str, tuple[float, float]]],
    agreement: tuple[float, float],
    timings: Sequence[Mapping[str, Any]],
    sweeps: Sequence[str],
    out: Path,
) -> str:
    columns = [*recipe.domains, "average"]
    lines = [
        f"| {' | '.join(['', *columns])} |",
        f"| {' | '.join(['---', *['---:'] * len(columns)])} |",
    ]
    for row, cells in table.items():
        shown = [f"{cells[c][0]:.1f} ± {cells[c][1]:.1f}" for c in columns]
        lines.append(f"| {' | '.join([title(row, recipe.domains), *shown])} |")
    return PAGE.format(
        name=recipe.name,
        domains=len(recipe.domains),
        count=len(seeds),
        source=source,
        seeds=" ".join(map(str, seeds)),
        folder=" --set folder=FOLDER" if recipe.folder else "",
        table="\n".join(lines),
        agreement=f"{100 * agreement[0]:.1f} ± {100 * agreement[1]:.1f}",
        router=100 * max(t["stages"].get("router", 0.0) / t["wall"] for t in timings),
        comparison=comparison_section(recipe.name, out),
        minutes=", ".join(f"{timing['wall'] / 60:.0f}" for timing in timings),
        sweeps="\n\n".join(
            f"### {SWEEP_TITLES[p]}\n\n![{SWEEP_TITLES[p]}]({recipe.name}/sweep_{p}.png)"
            for p in sweeps
        ),
        recipe=recipe_yaml(recipe, SHOWN_KEYS).rstrip(),
    )


if __name__ == "__main__":
    sys.exit(main())
