"""Training a Mixture-of-Experts against training the dense model, and two workers against one.

    python -m benchmarks.training_step [--device cuda] [--steps N] [--repeats N]

The library's trainer as it is, each training a process of its own with one thread a worker.

- Step time and memory of top-1 and top-2 MoE with balance and z-loss (H 256, I 704, 8 layers, 4
  experts) against the dense model, in fp32 and under bf16 autocast, for every experts
  implementation; the ratios are those of the one that the library chooses for this machine. Memory
  is anonymous memory above that of the imports; on a GPU, the allocator's. CPU time, which
  neighbours on the machine disturb less, stands beside the clock's.
- Two data-parallel workers (gloo) against one worker that accumulates the same two micro-batches:
  the largest difference of their loss curves, and of throughput. Without a balance loss: workers
  count their tokens together, accumulated micro-batches are counted one by one.
- Seconds to save a checkpoint, on the disk with its completion marker, and from the call to the end
  of the first step, fresh and resumed.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.common import (
    alternate,
    measure_child,
    median,
    median_ratio,
    print_result,
    print_table,
)
from benchmarks.training_run import Way, make_models, run
from upcycle_core.checkpoints.load import choose_experts_implementation

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
PRECISIONS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
IMPLEMENTATIONS = ("eager", "grouped_mm")
TOP = (1, 2)
DATA_PARALLEL_STEPS = 12
Found = dict[str, Any]
WAITS = ("save", "start", "resume")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=7, help="of each training, two to warm up")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        way = Way(**json.loads(options.run.read_text()))
        run(options.folder, way, options.run.with_suffix(".found"))
        return
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        make_models(folder, SHAPE)
        size: dict[str, Any] = {"batch_size": 4, "sequence_length": 128}
        if options.device != "cpu":  # more than its kernel launches
            size = {"batch_size": 64, "sequence_length": 256}
        make = partial(Way, steps=options.steps, device=options.device, **size)
        steps = step_times(folder, make, options.repeats)
        shared = data_parallel(folder, make) if options.device == "cpu" else {}
        kept = measure(folder, "kept", make(model="top-2", steps=4, resumes=True))
        report(steps, shared, kept, options.device, size)


def step_times(folder: Path, make: Callable[..., Way], repeats: int) -> dict[str, list[Found]]:
    """Every model in every precision with every implementation, in turns."""
    calls = {}
    for precision in PRECISIONS:
        ways = {"dense": make(model="dense", precision=precision)}
        for k in TOP:
            for name in IMPLEMENTATIONS:
                moe = make(model=f"top-{k}", precision=precision, experts=name)
                ways[f"top-{k} {name}"] = moe
        for name, one in ways.items():
            calls[f"{precision} {name}"] = partial(measure, folder, f"{precision} {name}", one)
    return alternate(calls, repeats)


def measure(folder: Path, name: str, way: Way) -> Found:
    """One training in a process of its own."""
    place = folder / "runs" / name.replace(" ", "-")
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)  # an earlier round would be resumed
    child = measure_child(_command(folder, way.saved(place.with_suffix(".json"))))
    found = json.loads(place.with_suffix(".found").read_text())
    found["memory_mb"] = found["gpu_mb"] or child.peak_anonymous_mb - found["before_mb"]
    return found


def data_parallel(folder: Path, make: Callable[..., Way]) -> dict[str, Found]:
    """The same training by one worker and by two."""
    shared = partial(make, model="top-2", steps=DATA_PARALLEL_STEPS, accumulation=2, balance=0.0)
    ways = {"one": shared(), "two": shared(workers=2)}
    found = {name: measure(folder, f"{name} workers", one) for name, one in ways.items()}
    del found["two"]["memory_mb"]  # of the process that waits for the two
    return found


def report(
    steps: Mapping[str, list[Found]],
    shared: Mapping[str, Found],
    kept: Found,
    device: str,
    size: Mapping[str, int],
) -> None:
    """Print the tables and the result."""
    seconds, cpu_seconds = (
        {name: [median(one[what]) for one in runs] for name, runs in steps.items()}
        for what in ("step_s", "step_cpu_s")
    )
    memory = {name: median([one["memory_mb"] for one in runs]) for name, runs in steps.items()}
    ratio: dict[str, float] = {}
    rows = []
    for name in steps:
        precision, _, model = name.partition(" ")
        dense = f"{precision} dense"
        over = median_ratio(seconds[dense], seconds[name])
        over_cpu = median_ratio(cpu_seconds[dense], cpu_seconds[name])
        heavier = memory[name] / memory[dense]
        chosen = model.endswith(f" {_chosen(device, precision)}")
        rows.append(
            [
                name,
                1000 * median(seconds[name]),
                over,
                over_cpu,
                memory[name],
                heavier,
                "yes" * chosen,
            ]
        )
        if chosen:
            label = f"{model.partition(' ')[0]} {precision}".replace("-", "").replace(" ", "_")
            ratio |= {label: over, f"{label}_memory": heavier}
    tokens = size["batch_size"] * size["sequence_length"]
    columns = ["", "step ms", "dense / this", "CPU time", "memory MB", "memory / dense", "chosen"]
    print_table(f"training steps of {tokens} tokens on {device}, one thread", columns, rows)
    if shared:
        one, two = shared["one"], shared["two"]
        losses = list(zip(one["loss"], two["loss"], strict=True))
        ratio["two_workers_loss_difference"] = max(abs(a - b) for a, b in losses)
        ratio["two_workers_throughput"] = median(one["step_s"]) / median(two["step_s"])
        rows = [
            [workers, 2 * tokens / median(found["step_s"]), found["loss"][0], found["loss"][-1]]
            for workers, found in shared.items()
        ]
        columns = ["workers", "tokens/s", "first loss", "last loss"]
        print_table(f"top-2 fp32, {DATA_PARALLEL_STEPS} steps of two micro-batches", columns, rows)
        rows = [["throughput, two / one", ratio["two_workers_throughput"]]]
        rows += [["loss curves, largest difference", f"{ratio['two_workers_loss_difference']:.1e}"]]
        print_table("two workers of one thread against one", ["", "value"], rows)
    rows = [
        [what, median(kept["save_s"]) if what == "save" else kept[f"{what}_s"]] for what in WAITS
    ]
    print_table("top-2 fp32, checkpoints", ["", "seconds"], rows)
    figures = {"steps": steps, "data_parallel": shared, "checkpoints": kept, "size": size}
    print_result("training_step", ratio, figures | {"shape": SHAPE, "device": device})


def _chosen(device: str, precision: Any) -> str:
    return choose_experts_implementation(device, precision, training=True)


def _command(folder: Path, way: Path) -> list[str]:
    module = [sys.executable, "-m", "benchmarks.training_step"]
    return [*module, "--folder", str(folder), "--run", str(way)]


if __name__ == "__main__":
    main()
