"""Training a DeRS-upcycled model against vanilla upcycling: memory and step time.

    python -m benchmarks.ders_training [--device cuda] [--precision bf16] [--steps N] [--repeats N]

One dense model (H 256, I 704, 8 layers), four experts in every layer, two a token: whole copies,
or one shared base with sparse or low-rank deltas. All are trained whole, base included, by the
library's trainer with AdamW and a load-balancing loss, each in a process of its own with one
thread, taking turns. ``ratio`` is theirs to vanilla upcycling's. Memory is anonymous memory above
that of the imports: weights, gradients, the optimizer's two moments, activations; on a GPU, the
allocator's. CPU time, which neighbours on the machine disturb less, stands beside the clock's.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    alternate,
    measure_child,
    median,
    median_ratio,
    print_result,
    print_table,
)
from benchmarks.training_run import EXPERTS, Way, make_models, run
from benchmarks.training_step import SHAPE
from upcycle_core.baselines.upcycling import write_sparse_upcycling
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.moe.size import parameter_counts

DENSE, VANILLA = "dense", "vanilla"
WAYS = {
    "sparse-0.9": DersUpcyclingConfig(codec="sparse", drop_rate=0.9),
    "sparse-0.99": DersUpcyclingConfig(codec="sparse", drop_rate=0.99),
    "rank-4": DersUpcyclingConfig(codec="low_rank", rank=4),
}
TOP_K = 2
SHARD = 1 << 30
Found = dict[str, Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=7, help="of each training, two to warm up")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        way = Way(**json.loads(options.run.read_text()))
        run(options.folder, way, options.run.with_suffix(".found"))
        return
    size = {"batch_size": 4, "sequence_length": 128}
    if options.device != "cpu":  # more than its kernel launches
        size = {"batch_size": 64, "sequence_length": 256}
    with tempfile.TemporaryDirectory(prefix="ders-training-") as name:
        folder = Path(name)
        make(folder)
        how: dict[str, Any] = {"steps": options.steps, "precision": options.precision, **size}
        calls = {
            model: partial(measure, folder, Way(model=model, device=options.device, **how))
            for model in (DENSE, VANILLA, *WAYS)
        }
        found = alternate(calls, options.repeats)
        parameters = {model: parameter_counts(folder / model).total for model in calls}
    report(found, parameters, how | {"device": options.device})


def make(folder: Path) -> None:
    """The dense model, and what each way makes of it."""
    make_models(folder, SHAPE)
    dense = folder / DENSE
    write_sparse_upcycling(
        dense, folder / VANILLA, copies=EXPERTS, top_k=TOP_K, router_seed=0, max_shard_bytes=SHARD
    )
    for name, config in WAYS.items():
        write_ders_upcycling(
            dense,
            folder / name,
            config=config,
            experts=EXPERTS,
            top_k=TOP_K,
            seed=0,
            max_shard_bytes=SHARD,
        )


def measure(folder: Path, way: Way) -> Found:
    """One training in a process of its own."""
    place = folder / "runs" / way.model
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)  # an earlier round would be resumed
    file = way.saved(place.with_name(f"{way.model}.json"))
    module = [sys.executable, "-m", "benchmarks.ders_training"]
    child = measure_child([*module, "--folder", str(folder), "--run", str(file)])
    found = json.loads(file.with_suffix(".found").read_text())
    found["memory_mb"] = found["gpu_mb"] or child.peak_anonymous_mb - found["before_mb"]
    return found


def report(
    found: Mapping[str, list[Found]], parameters: Mapping[str, int], how: Mapping[str, Any]
) -> None:
    """Print the table and the result."""
    seconds, cpu_seconds = (
        {name: [median(one[what]) for one in runs] for name, runs in found.items()}
        for what in ("step_s", "step_cpu_s")
    )
    memory = {name: median([one["memory_mb"] for one in runs]) for name, runs in found.items()}
    ratio: dict[str, float] = {}
    rows = []
    for name in found:
        over = median_ratio(seconds[name], seconds[VANILLA])
        lighter = memory[name] / memory[VANILLA]
        if name in WAYS:
            ratio |= {f"{name}_step": over, f"{name}_memory": lighter}
        rows.append(
            [
                name,
                (parameters[name] - parameters[DENSE]) / 1e6,
                1000 * median(seconds[name]),
                over,
                median_ratio(cpu_seconds[name], cpu_seconds[VANILLA]),
                memory[name],
                lighter,
                found[name][0]["loss"][-1],
            ]
        )
    tokens = how["batch_size"] * how["sequence_length"]
    columns = ["", "added M", "step ms", "/ vanilla", "CPU time / vanilla"]
    columns += ["memory MB", "/ vanilla", "last loss"]
    title = f"training steps of {tokens} tokens on {how['device']}, {how['precision']}"
    print_table(f"{title}, {EXPERTS} experts, top {TOP_K}, one thread", columns, rows)
    figures = {"runs": found, "parameters": parameters, "shape": SHAPE, **how}
    print_result("ders_training", ratio, figures)


if __name__ == "__main__":
    main()
