"""Growing a fifth domain against building the five-domain model again.

    python -m benchmarks.grow [--steps N]

Both begin with a home where a model of four domains has been built: growing goes on there;
rebuilding trains five experts from that model's seed in a home of its own. What is compared is the
time in which pieces ran, from the text to the report. Services are left out; the commands' wall
times stand beside it, and the same without the report.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.children import ROOT
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.noop_retrain import FEW_STEPS, run

FIFTH = "packages"
SOURCE = {"harvest": "python-elsewhere", "max_bytes": 6_000_000}
LEFT_OUT = ("task_scores", "sources")
AT_MOST = 0.35


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument("--steps", type=int, default=200, help="of each expert; the demo's")
    options = parser.parse_args()
    values = yaml.safe_load(options.recipe.read_text())
    settings = [*FEW_STEPS, f"experts.training.steps={options.steps}"]
    changes = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="grow-") as folder:
        home, again = Path(folder, "home"), Path(folder, "again")
        run(["-m", "flows.dume", str(options.recipe), *changes], home)
        values["domains"][FIFTH] = {"train": SOURCE}
        five = _save(Path(folder, "five.yaml"), values)
        grow = run(["-m", "flows.grow", str(five), FIFTH, *changes], home)
        grown = _stages(home / values["name"])
        values["seed_model"] = {"model": str(home / values["name"] / "seed")}
        given = _save(Path(folder, "given.yaml"), values)
        rebuild = run(["-m", "flows.dume", str(given), *changes[2:]], again)
        rebuilt = _stages(again / values["name"])
    names = [name for name in rebuilt if name in {*grown, *rebuilt}]
    rows = [[name, grown.get(name, 0.0), rebuilt[name]] for name in names]
    sums = [sum(grown.values()), sum(rebuilt.values())]
    rows += [["all", *sums], ["the command, on the clock", grow, rebuild]]
    print_table("seconds of pieces", ["stage", "grow", "rebuild"], rows)
    made = [sums[i] - stages.get("report", 0.0) for i, stages in enumerate((grown, rebuilt))]
    figures = {
        "without_report": made[0] / made[1],
        "goal": {"at_most": AT_MOST},
        "stages": {"grow": grown, "rebuild": rebuilt},
        "wall": {"grow": grow, "rebuild": rebuild, "ratio": grow / rebuild},
    }
    print_result("grow", sums[0] / sums[1], figures)


def _save(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def _stages(workspace: Path) -> dict[str, float]:
    """Seconds in which pieces of a stage ran, in the last flow."""
    found = json.loads((workspace / "timings.json").read_text())["stages"]
    return {name: seconds for name, seconds in found.items() if name not in LEFT_OUT and seconds}


if __name__ == "__main__":
    main()
