"""What it costs to be told: CPU seconds of ``--help`` and of refusals, beside starting Python.

    python -m benchmarks.refusals [--repeats N]

Each is a command of its own, measured from outside. Nothing heavy may be imported for any of them.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.children import ROOT
from benchmarks.common import alternate, median, parser_of, print_result, print_table

DEMO = "recipes/demo.yaml"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "--help": ["-m", "flows.dume", "--help"],
    "a wrong key": ["-m", "flows.dume", DEMO, "--set", "router.lamda=3"],
    "a recipe that is missing": ["-m", "flows.dume", "no-such-recipe.yaml"],
    "texts that are missing": ["-m", "flows.dume", "recipes/nightly.yaml", "--set", "folder=/none"],
}
BARE = next(iter(COMMANDS))
AT_MOST_CPU_SECONDS = {"--help": 1.0}
AT_MOST_WALL_SECONDS = 2.0


def main() -> None:
    """Measure and print."""
    options = parser_of(__doc__, repeats=5).parse_args()
    with tempfile.TemporaryDirectory(prefix="refusals-") as home:
        calls = {n: partial(_seconds, words, Path(home)) for n, words in COMMANDS.items()}
        found = alternate(calls, options.repeats)
    wall, cpu = (
        {name: median([seconds[clock] for seconds in times]) for name, times in found.items()}
        for clock in (0, 1)
    )
    ratios = {name: cpu[name] / cpu[BARE] for name in cpu if name != BARE}
    rows = [[name, wall[name], cpu[name], cpu[name] / cpu[BARE]] for name in COMMANDS]
    print_table("seconds", ["command", "wall", "CPU", "ratio of CPU"], rows)
    goal = {"cpu_seconds": AT_MOST_CPU_SECONDS, "wall_seconds": AT_MOST_WALL_SECONDS}
    print_result("refusals", ratios, {"goal": goal, "wall_s": wall, "cpu_s": cpu})


def _seconds(words: list[str], home: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a command that ends by itself, whatever its exit code says."""
    environment = {**os.environ, "UPCYCLE_HOME": str(home)}
    command, nowhere = [sys.executable, *words], subprocess.DEVNULL
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=nowhere, stderr=nowhere
    ) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
