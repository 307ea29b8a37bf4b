"""Processes of their own: a command, or a call, measured from outside; and the flows' commands."""

import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_SECONDS = 0.002
"""How often a child's memory is looked at. A tensor of 10 MB takes longer than this to write."""


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
        peak, usage = 0.0, None
        # Reading the pipe would block; no child says more than a pipe holds (64 kB).
        while usage is None:
            peak = max(peak, memory_mb("RssAnon", pid=child.pid))
            pid, status, resources = os.wait4(child.pid, os.WNOHANG)
            if pid:
                usage, child.returncode = resources, os.waitstatus_to_exitcode(status)
            else:
                time.sleep(SAMPLE_SECONDS)
        wall = time.perf_counter() - start
        said = child.stderr.read() if child.stderr else ""
    if child.returncode:
        ended = f"failed ({child.returncode}; a signal if below 0)"  # a killed one says nothing
        raise RuntimeError(f"{' '.join(command)[:200]} {ended}:\n{said[-2000:]}")
    return ChildFigures(wall, usage.ru_utime + usage.ru_stime, peak)


def child_command(
    function: Callable[..., Any], *arguments: Any, answer: Path | None = None
) -> list[str]:
    """The command that calls ``function`` in a process of its own.

    The process imports the module of the function, which may be the benchmark that runs, and what
    its arguments are made of.

    Args:
        function: At the top of its module.
        arguments: What it is given.
        answer: The file that ``call_in_child`` reads.
    """
    module = function.__module__
    program = sys.modules["__main__"].__spec__
    if module == "__main__" and program is not None:
        module = program.name
    call = pickle.dumps((module, function.__qualname__, arguments, answer)).hex()
    return [sys.executable, "-c", "from benchmarks.children import perform; perform()", call]


def call_in_child(
    function: Callable[..., Mapping[str, Any]], *arguments: Any, threads: int = 1
) -> dict[str, Any]:
    """Call ``function`` in a process of its own.

    Args:
        function: At the top of its module; returns what JSON can say.
        arguments: What it is given.
        threads: How many threads the process may use.

    Returns:
        What the function returned, and in MB ``before_mb``, the process's anonymous memory after
        its imports; ``gpu_mb``, the allocator's peak, 0 where no GPU was used; ``memory_mb``, that
        peak, or else the one of anonymous memory above ``before_mb``.

    Raises:
        RuntimeError: It failed; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="child-") as folder:
        file = Path(folder, "answer.json")
        child = measure_child(child_command(function, *arguments, answer=file), threads=threads)
        facts = json.loads(file.read_text())
    memory = facts["gpu_mb"] or child.peak_anonymous_mb - facts["before_mb"]
    return {**facts, "memory_mb": memory}


def perform() -> None:
    """What the process of ``child_command`` does."""
    module, name, arguments, file = pickle.loads(bytes.fromhex(sys.argv[1]))
    function = getattr(importlib.import_module(module), name)
    before = memory_mb("RssAnon")
    facts = function(*arguments)
    if file is not None:
        gpu = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_initialized() else 0.0
        file.write_text(json.dumps({"before_mb": before, "gpu_mb": gpu, **facts}))


def memory_mb(field: str, *, pid: int | None = None) -> float:
    """A line of a process's status, in MB: ``RssAnon`` (no file backs it), ``VmRSS``, ``VmHWM``.

    Args:
        field: Which.
        pid: The process; this one by default. 0 of one that has just ended.
    """
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return 0.0
    held = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(held.group(1)) / 1000 if held else 0.0


def run_python(arguments: Sequence[str], *, environment: Mapping[str, str]) -> float:
    """Wall seconds of a command of the checkout, with Python's start.

    Args:
        arguments: ``-m``, a module, and what it is given; or ``-c`` and a program.
        environment: All variables that it gets.

    Raises:
        RuntimeError: It failed; the message ends with what it said.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{said}")
    return time.perf_counter() - started
