"""What the flow adds to its heavy pieces: services, versions, waiting.

    python -m benchmarks.flow_overhead [--recipe RECIPE] [--repeats N]

Runs the whole flow in an empty home, as a command. The overhead is the wall time in which no piece
ran on any worker, as a share of the wall time of the command, start of Python and of Prefect's
server included. Pieces' own time is the union of the intervals from their first to their last line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import median, print_result, print_table, repeat
from tasks.recipes import load_recipe

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument("--repeats", type=int, default=1, help="the demo takes minutes")
    options = parser.parse_args()
    runs = repeat(lambda: _run(options.recipe), options.repeats)
    rows = [[run["wall"], run["pieces"], run["overhead"]] for run in runs]
    print_table("flow", ["wall s", "pieces s", "overhead"], rows)
    stages = [[stage, seconds] for stage, seconds in runs[-1]["stages"].items()]
    print_table("pieces of the last run, by stage", ["stage", "seconds"], stages)
    print_result("flow_overhead", median([run["overhead"] for run in runs]), {"runs": runs})


def _run(recipe: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="overhead-") as home:
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "flows.dume", str(recipe)],
            cwd=ROOT,
            env={**os.environ, "UPCYCLE_HOME": home},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        wall = time.perf_counter() - started
        timings = json.loads((Path(home) / load_recipe(recipe).name / "timings.json").read_text())
    return {**timings, "wall": wall, "overhead": 1 - timings["pieces"] / wall}


if __name__ == "__main__":
    main()
