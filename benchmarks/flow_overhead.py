"""What the flow adds to its heavy pieces: services, versions, waiting.

    python -m benchmarks.flow_overhead [--recipe RECIPE] [--repeats N]

Runs the whole flow in an empty home, as a command. The overhead is the wall time in which no piece
ran on any worker, as a share of the wall time of the command, start of Python and of Prefect's
server included. Pieces' own time is the union of the intervals from their first to their last line.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT, run_python
from benchmarks.common import median, parser_of, print_result, print_table
from tasks.recipes import load_recipe


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=1)  # the demo takes minutes
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    options = parser.parse_args()
    runs = [_run(options.recipe) for _ in range(options.repeats)]
    rows = [[run["wall"], run["pieces"], run["overhead"]] for run in runs]
    print_table("flow", ["wall s", "pieces s", "overhead"], rows)
    stages = [[stage, seconds] for stage, seconds in runs[-1]["stages"].items()]
    print_table("pieces of the last run, by stage", ["stage", "seconds"], stages)
    print_result("flow_overhead", median([run["overhead"] for run in runs]), {"runs": runs})


def _run(recipe: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="overhead-") as home:
        environment = {**os.environ, "UPCYCLE_HOME": home}
        wall = run_python(["-m", "flows.dume", str(recipe)], environment=environment)
        timings = json.loads((Path(home) / load_recipe(recipe).name / "timings.json").read_text())
    return {**timings, "wall": wall, "overhead": 1 - timings["pieces"] / wall}


if __name__ == "__main__":
    main()
