"""What every benchmark shares: its command line, repeats, clocks, tables, the result.

A benchmark prints a table for people and, as its last line, one JSON object: ``ratio`` (a number or
an object of numbers, medians over the repeats), the figures behind it, versions and machine.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")
VERSIONS = ("torch", "transformers", "safetensors", "numpy", "scipy")


def parser_of(
    doc: str | None, *, repeats: int | None = None, device: bool = False
) -> argparse.ArgumentParser:
    """A parser of what most benchmarks can be told.

    Args:
        doc: The benchmark's docstring, whose first line is shown.
        repeats: How many there are by default; no ``--repeats`` without.
        device: Whether there is a ``--device``, a GPU by default where there is one.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", maxsplit=1)[0])
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)
    return parser


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


@dataclass(frozen=True)
class Clocks:
    """Seconds of calls that took turns, one a round, by name.

    Args:
        wall: On the clock.
        cpu: Of CPU time, which neighbours on the machine disturb less.
    """

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], times: int, *, device: str, warm_up: int = 1
) -> Clocks:
    """Time calls that take turns.

    Args:
        calls: What to call, by name.
        times: Rounds.
        device: Where they compute.
        warm_up: Rounds that are not counted: the first pays for kernels and memory.
    """
    alternate(calls, warm_up)
    timed = {name: partial(_timing, call, device) for name, call in calls.items()}
    found = alternate(timed, times)
    wall, cpu = (
        {name: [timing[clock] for timing in timings] for name, timings in found.items()}
        for clock in (0, 1)
    )
    return Clocks(wall, cpu)


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


def _wait_for(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _timing(call: Callable[[], object], device: str) -> tuple[float, float]:
    start = time.process_time()
    wall = seconds_of(call, device=device)
    return wall, time.process_time() - start


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot go into the result")
