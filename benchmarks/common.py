"""What every benchmark shares: repeats, child processes measured from outside, tables, the result.

A benchmark prints a table for people and, as its last line, one JSON object: ``ratio`` (a number or
an object of numbers, medians over the repeats), the figures behind it, versions and machine.
"""

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")
VERSIONS = ("torch", "transformers", "safetensors", "numpy", "scipy")
# How often a child's memory is looked at. A tensor of 10 MB takes longer than this to write.
SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class ChildFigures:
    """One process, from start to end.

    Args:
        wall_s: Seconds on the clock.
        cpu_s: Seconds of CPU time, user and system, with its own children.
        peak_anonymous_mb: Largest RssAnon seen, in MB: what it holds itself, mapped files aside.
    """

    wall_s: float
    cpu_s: float
    peak_anonymous_mb: float


def measure_child(
    command: Sequence[str], *, threads: int = 1, environment: Mapping[str, str] | None = None
) -> ChildFigures:
    """Run ``command`` and measure it from outside.

    Args:
        command: Program and arguments.
        threads: How many threads its numerical libraries may use.
        environment: More variables.

    Raises:
        RuntimeError: It failed; the message ends with what it said.
    """
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    variables = {**os.environ, **pinned, **(environment or {})}
    start = time.perf_counter()
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        peak_kb, usage = 0, None
        # Reading the pipe would block; no child says more than a pipe holds (64 kB).
        while usage is None:
            peak_kb = max(peak_kb, _anonymous_kb(child.pid))
            pid, status, resources = os.wait4(child.pid, os.WNOHANG)
            if pid:
                usage, child.returncode = resources, os.waitstatus_to_exitcode(status)
            else:
                time.sleep(SAMPLE_SECONDS)
        wall = time.perf_counter() - start
        said = child.stderr.read() if child.stderr else ""
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{said[-2000:]}")
    return ChildFigures(wall, usage.ru_utime + usage.ru_stime, peak_kb / 1000)


def repeat(measure: Callable[[], Result], times: int) -> list[Result]:
    """Call ``measure`` ``times`` times."""
    return [measure() for _ in range(times)]


def alternate(measures: Mapping[str, Callable[[], Result]], times: int) -> dict[str, list[Result]]:
    """Take turns, so that a machine that slows down slows everyone.

    Args:
        measures: What to call, by name.
        times: Rounds.

    Returns:
        Name to results, one a round.
    """
    found: dict[str, list[Result]] = {name: [] for name in measures}
    for _ in range(times):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def median(values: Sequence[float]) -> float:
    """The middle of ``values``."""
    return float(statistics.median(values))


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median, over the rounds, of one measurement divided by the other of the same round."""
    return median([a / b for a, b in zip(over, under, strict=True)])


def seconds_of(call: Callable[[], object], *, device: str = "cpu") -> float:
    """Wall time of one call, a GPU's work included."""
    _wait_for(device)
    start = time.perf_counter()
    call()
    _wait_for(device)
    return time.perf_counter() - start


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under aligned columns; floats with three digits."""
    cells = [[_shown(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    print(f"\n{title}")
    for line in (columns, ["-" * width for width in widths], *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def print_result(
    name: str, ratio: float | Mapping[str, float], figures: Mapping[str, object]
) -> None:
    """Print the last line: one JSON object.

    Args:
        name: The benchmark.
        ratio: What is claimed; medians.
        figures: What it was computed from.
    """
    line = {
        "benchmark": name,
        "ratio": ratio,
        "figures": figures,
        "versions": versions(),
        "machine": machine(),
    }
    print(json.dumps(line, default=_plain), flush=True)


def versions() -> dict[str, str]:
    """Python and the packages that decide numbers."""
    found = {"python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in VERSIONS}


def machine() -> dict[str, object]:
    """What the numbers were taken on."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.is_file() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    has_gpu = torch.cuda.is_available()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model.group(1) if model else platform.processor(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
    }


def _anonymous_kb(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found.group(1)) if found else 0


def _wait_for(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(value: object) -> object:
    if isinstance(value, ChildFigures):
        return asdict(value)
    raise TypeError(f"{value!r} cannot go into the result")
