"""A whole flow of ready experts beside its plan: memory of pieces, and what is on the disk.

    python -m benchmarks.planned_flow [--size 25m|135m|1b|3b] [--domains N] [--folder FOLDER]

Experts of random weights in bf16 (``benchmarks.ready_experts``) are joined by `flows.dume` in a
home of its own, which links to their files and has no remote, so that the disk has room for large
ones. Of each stage: what the plan says that a piece holds and the stage keeps, and the most that a
piece of it held (anonymous memory, its interpreter included) and what lies there. Stages that hold
next to nothing, and keep less than a megabyte, are left out.
"""

import os
import tempfile
from pathlib import Path

from benchmarks.children import run_python
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.ready_experts import SIZES, make
from infra.cluster.memory import held_bytes
from tasks.engine.costs import read_cost
from tasks.engine.workspace import Workspace
from tasks.methods import stages_of
from tasks.planning.machine import Machine
from tasks.planning.plan import plan
from tasks.recipes import load_recipe

LEAST = 1_000_000
"""Bytes that are worth a row."""
FIGURES = ("planned_memory", "memory", "planned_kept", "kept")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=[*SIZES], default="25m")
    parser.add_argument("--domains", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where all is made, and stays; empty")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planned-flow-") as temporary:
        folder = options.folder or Path(temporary)
        versions = {"given_weights": "link", "remote": None}
        recipe = make(folder, SIZES[options.size], options.domains, versions)
        home = folder / "home"
        environment = {**os.environ, "UPCYCLE_HOME": str(home)}
        run_python(["-m", "flows.dume", str(recipe)], environment=environment)
        found = stages(recipe, home)
    rows = [[name, *(own[figure] / 1e6 for figure in FIGURES)] for name, own in found.items()]
    head = ["stage", "memory, planned MB", "measured", "kept, planned MB", "there"]
    print_table(f"{options.size}, {options.domains} experts", head, rows)
    ratios = {
        f"{name}: {kind}": own[f"planned_{kind}"] / own[kind]
        for name, own in found.items()
        for kind in ("memory", "kept")
        if min(own[f"planned_{kind}"], own[kind]) > LEAST
    }
    print_result("planned_flow", ratios, {"size": options.size, "domains": options.domains})


def stages(recipe: Path, home: Path) -> dict[str, dict[str, int]]:
    """Bytes by stage: what the plan says, and what was."""
    loaded, base = load_recipe(recipe), held_bytes()
    workspace = Workspace(home / loaded.name)
    made = plan(loaded, home, Machine.here(home, loaded.compute.cpus), base=base)
    planned = {row.stage: row for row in made.rows}
    found = {}
    for stage in stages_of(loaded):
        items = list(stage.items(loaded))
        if not items:
            continue
        files = [file for item in items for file in workspace.path(stage.artifact(item)).rglob("*")]
        costs = [read_cost(workspace, stage.label(item)) for item in items]
        row, kept = planned[stage.name], sum(f.stat().st_size for f in files if f.is_file())
        own = {
            "planned_memory": base + row.memory if row.memory else 0,
            "memory": max((cost.peak_memory_bytes for cost in costs if cost), default=0),
            "planned_kept": row.kept,
            "kept": kept,
        }
        if row.memory or max(row.kept, kept) > LEAST:
            found[stage.name] = own
    return found


if __name__ == "__main__":
    main()
