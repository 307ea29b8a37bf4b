"""What each part of joining in closed form gives: one table of DUME flows on the same experts.

    python -m benchmarks.closed_form [RECIPE] [--set KEY=VALUE ...] [--rows NAME ...] [--out FOLDER]

Every row is a run of ``flows.dume`` in one workspace (``NAME-closed-form``, of the demo's recipe by
default): experts are trained once, and only what a row changes is made again. Percent of each
domain's dense expert, mean of domains, of the oracle, DUME at k = 1 and at k = 2; what the backbone
costs (100 - oracle) and the routers (oracle - DUME); tokens that routers send to their own domain's
expert; DUME's perplexity, the geometric mean of domains, which no weak expert makes better.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from infra import settings as environment
from tasks.recipes import load_recipe

COUNTS = ("backbone.merge.embeddings=counts",)
DOWN = (*COUNTS, "experts.repair=down")
FULL = (*COUNTS, "experts.repair=down+head_target")
SOLVED = ("router.normalise=none", "router.scale=8")
AS_SOLVED = (*FULL, *SOLVED)
FITTED = (*FULL, "backbone.merge.head=fitted")
FFNS = ("experts.training.method=ffn",)
"""Experts that share a frozen backbone, as FlexOlmo's and BAR's do: nothing is averaged."""
ROUTED = "experts.repair_tokens=routed"
PRINTED = "moe.normalise_top_k=false"
"""DUME's equation 4 as printed: a token's weights do not sum to one. Not of a Llama (``--set
seed_model.shape.family=qwen2``)."""
ROWS: Mapping[str, tuple[str, ...]] = {
    "average": (),
    "counts": COUNTS,
    "regmean": ("backbone.merge.attention=regmean",),
    "distilled": ("backbone.merge.attention=distilled",),
    "average+down": ("experts.repair=down",),
    "counts+down": DOWN,
    "counts+repair": FULL,
    "counts+regmean+repair": (*FULL, "backbone.merge.attention=regmean"),
    "counts+distilled+repair": (*FULL, "backbone.merge.attention=distilled"),
    "counts+repair, lambda 100": (*FULL, "router.ridge_lambda=100"),
    "counts+repair, as solved": (*AS_SOLVED, "router.scale=1"),
    "counts+repair, as solved, x 8": AS_SOLVED,
    "counts+repair, as solved, x 32": (*AS_SOLVED, "router.scale=32"),
    "counts+repair, as solved, x 8, sequential": (*AS_SOLVED, "router.solve=sequential"),
    "counts+repair, routed": (*FULL, ROUTED),
    "counts+repair, as solved, x 8, routed": (*AS_SOLVED, ROUTED),
    "fitted head": FITTED,
    "fitted head, as solved, x 8": (*FITTED, *SOLVED),
    "fitted head, as solved, x 8, sequential": (*FITTED, *SOLVED, "router.solve=sequential"),
    "fitted head, as solved, x 8, routed": (*FITTED, *SOLVED, ROUTED),
    "counts+repair, rows of means": (*FULL, "router.rows=means"),
    "fitted head, as solved, x 8, equation 4": (*FITTED, *SOLVED, PRINTED),
    "FFNs alone": FFNS,
    "FFNs alone, rows of means": (*FFNS, "router.rows=means"),
}
"""Row to what it changes of the paper's way."""
PAPER = (
    *("experts.repair=none", "experts.repair_tokens=own"),
    *("backbone.merge.embeddings=average", "backbone.merge.head=average"),
    *("backbone.merge.attention=average", "registry.certificate=none", "versions.remote=null"),
    *("router.normalise=columns", "router.scale=1"),
    *("evaluation.sweep_top_k=[2]", "evaluation.sweep_ridge_lambda=[]"),
    *("evaluation.sweep_window=[]", "evaluation.random_routing_seeds=[0]"),
)
COLUMNS = ("Oracle", "DUME", "k = 2", "Agreement", "Worst domain")
"""What every row has in a file."""
PERPLEXITY, GAPS = "Perplexity", ("Backbone gap", "Router gap")
SHOWN = (*COLUMNS[:3], *GAPS, *COLUMNS[3:], PERPLEXITY)


def main() -> None:
    """Run the rows and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/demo.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*ROWS],
        help="by default all but equation 4 as printed, which Llamas refuse",
    )
    parser.add_argument("--out", type=Path, help="folder for NAME.json; finished rows stay")
    chosen = parser.parse_args()
    recipe = load_recipe(chosen.recipe, chosen.set)
    name = f"{recipe.name}-closed-form"  # a workspace of its own: rows leave another model in it
    workspace = environment.configure().home / name
    file = None if chosen.out is None else chosen.out / f"{recipe.name}.json"
    found = json.loads(file.read_text()) if file is not None and file.exists() else {}
    for row in chosen.rows or [row for row, changes in ROWS.items() if PRINTED not in changes]:
        changes = [*chosen.set, f"name={name}", *PAPER, *ROWS[row]]
        found[row] = measured(chosen.recipe, changes, workspace)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n")
        print(table(found), flush=True)


def measured(recipe: Path, changes: Sequence[str], workspace: Path) -> dict[str, float]:
    """A row's figures, of a flow that brings the workspace to it. Those of k = 2 are the row's own
    routers with another k, solved layer by layer or at once.

    Raises:
        RuntimeError: The flow failed.
    """
    sets = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "flows.dume", str(recipe), *sets]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    metrics = json.loads((workspace / "report" / "metrics.json").read_text())
    averages, (double,) = metrics["normalised_average"], metrics["sweeps"]["top_k"]["dume"]
    figures = (
        averages["oracle"],
        averages["dume"],
        double["normalised_average"],
        100 * metrics["routing"]["agreement"],
        min(metrics["normalised"]["dume"].values()),
    )
    absolute = {PERPLEXITY: geometric_mean(metrics["perplexity"]["dume"].values())}
    return {**dict(zip(COLUMNS, figures, strict=True)), **absolute}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """The rows as Markdown, with the two gaps; a dash where a file of before lacks a figure."""
    rows = {row: {**figures, **gaps(figures)} for row, figures in found.items()}
    columns = [name for name in SHOWN if any(name in figures for figures in rows.values())]
    lines = ["", f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for row, figures in rows.items():
        cells = " | ".join(f"{figures[c]:.2f}" if c in figures else "–" for c in columns)
        lines.append(f"| {row} | {cells} |")
    return "\n".join(lines)


def gaps(figures: Mapping[str, float]) -> dict[str, float]:
    """What the backbone and the routers cost, in points."""
    backbone, router = 100 - figures["Oracle"], figures["Oracle"] - figures["DUME"]
    return dict(zip(GAPS, (backbone, router), strict=True))


if __name__ == "__main__":
    main()
