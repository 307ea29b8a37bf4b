"""A flow of 4, 16 and 64 ready experts: what each stage costs, and what a domain more costs it.

    python -m benchmarks.many_experts [--domains 4 16 64] [--size 1m]

Experts of random weights in bf16 and texts of random words (``benchmarks.ready_experts``) are
joined by `flows.dume` in a home of its own, which links to their files and has no remote. Of each
stage: seconds of its pieces times their cores, the most anonymous memory that a piece held, its
interpreter included, and the bytes that it keeps. `a domain` is the cost a domain of the largest
number over that of the smallest: 1 where a stage grows as D does, above where it grows faster. The
whole flow is its wall time, with the start of all its processes.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.children import run_python
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.ready_experts import SIZES, make
from tasks.engine.costs import read_cost
from tasks.engine.workspace import Workspace
from tasks.methods import stages_of
from tasks.recipes import load_recipe

STAGES = ("corpora", "experts", "backbone", "statistics", "router", "model", "report")
FLOW = "whole flow"
MB = 1e6


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--domains", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--size", choices=[*SIZES], default="1m")
    options = parser.parse_args()
    found = {count: measured(count, options.size) for count in sorted(options.domains)}
    first, last = min(found), max(found)
    rows: list[list[object]] = []
    ratios: dict[str, float] = {}
    for stage in (*STAGES, FLOW):
        own = {count: figures[stage] for count, figures in found.items()}
        each = {
            kind: (own[last][kind] / last) / (own[first][kind] / first)
            for kind in ("seconds", "kept_mb")
            if own[first][kind] > 0
        }
        ratios |= {f"{stage}: {kind} a domain": ratio for kind, ratio in each.items()}
        cells = [own[count][kind] for kind in ("seconds", "memory_mb", "kept_mb") for count in own]
        rows.append([stage, *cells, each.get("seconds", 0.0), each.get("kept_mb", 0.0)])
    kinds = ("core s", "memory MB", "kept MB")
    head = ["stage", *(f"{kind}, {count}" for kind in kinds for count in found)]
    print_table(f"{options.size}", [*head, "s a domain", "kept a domain"], rows)
    print_result("many_experts", ratios, {"stages": found, "size": options.size})


def measured(domains: int, size: str) -> dict[str, dict[str, float]]:
    """Figures of each stage, and of the flow, of so many experts."""
    with tempfile.TemporaryDirectory(prefix="many-") as name:
        folder = Path(name)
        recipe = make(folder, SIZES[size], domains, {"given_weights": "link", "remote": None})
        home = folder / "home"
        environment = {**os.environ, "UPCYCLE_HOME": str(home)}
        wall = run_python(["-m", "flows.dume", str(recipe)], environment=environment)
        found = stages(recipe, home)
        kept = sum(own["kept_mb"] for own in found.values())
        memory = max(own["memory_mb"] for own in found.values())
    return {**found, FLOW: {"seconds": wall, "memory_mb": memory, "kept_mb": kept}}


def stages(recipe: Path, home: Path) -> Mapping[str, dict[str, float]]:
    """Of each stage, all its items together."""
    loaded = load_recipe(recipe)
    workspace = Workspace(home / loaded.name)
    found = {}
    for stage in stages_of(loaded):
        if stage.name not in STAGES:
            continue
        items = list(stage.items(loaded))
        files = {file for item in items for file in workspace.path(stage.artifact(item)).rglob("*")}
        costs = [cost for item in items if (cost := read_cost(workspace, stage.label(item)))]
        found[stage.name] = {
            "seconds": sum(cost.core_seconds for cost in costs),
            "memory_mb": max((cost.peak_memory_bytes for cost in costs), default=0) / MB,
            "kept_mb": sum(f.stat().st_size for f in files if f.is_file()) / MB,
        }
    return found


if __name__ == "__main__":
    main()
