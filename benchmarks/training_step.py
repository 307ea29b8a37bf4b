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

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.common import alternate, median, median_ratio, parser_of, print_result, print_table
from benchmarks.models import SHAPE
from benchmarks.training import (
    DENSE,
    Found,
    Steps,
    Training,
    make_models,
    step_size,
    train_in_child,
)
from upcycle_core.checkpoints.load import choose_experts_implementation

PRECISIONS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
IMPLEMENTATIONS = ("eager", "grouped_mm")
TOP = (1, 2)
DATA_PARALLEL_STEPS = 12
WAITS = ("save", "start", "resume")
MEMORY = ("before_mb", "gpu_mb", "memory_mb")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=1, device=True)
    parser.add_argument("--steps", type=int, default=7, help="of each training, two to warm up")
    options = parser.parse_args()
    size = step_size(options.device)
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        make_models(folder)
        make = partial(Training, steps=options.steps, device=options.device, **size)
        steps = step_times(folder, make, options.repeats)
        shared = data_parallel(folder, make) if options.device == "cpu" else {}
        kept = train_in_child(folder, make(model="top-2", steps=4, resumes=True))
    report(steps, shared, kept, options.device, size)


def step_times(folder: Path, make: Callable[..., Training], repeats: int) -> dict[str, list[Found]]:
    """Every model in every precision with every implementation, in turns."""
    trainings = {}
    for precision in PRECISIONS:
        trainings[f"{precision} {DENSE}"] = make(model=DENSE, precision=precision)
        for k in TOP:
            for name in IMPLEMENTATIONS:
                moe = make(model=f"top-{k}", precision=precision, experts=name)
                trainings[f"{precision} top-{k} {name}"] = moe
    calls = {name: partial(train_in_child, folder, one) for name, one in trainings.items()}
    return alternate(calls, repeats)


def data_parallel(folder: Path, make: Callable[..., Training]) -> dict[str, Found]:
    """The same training by one worker and by two."""
    shared = partial(make, model="top-2", steps=DATA_PARALLEL_STEPS, accumulation=2, balance=0.0)
    one, two = (train_in_child(folder, shared(workers=workers)) for workers in (1, 2))
    for figure in MEMORY:  # of the process that waits for the two
        del two[figure]
    return {"one": one, "two": two}


def report(
    steps: Mapping[str, list[Found]],
    shared: Mapping[str, Found],
    kept: Found,
    device: str,
    size: Mapping[str, int],
) -> None:
    """Print the tables and the result."""
    measured = Steps(steps)
    seconds, cpu_seconds, memory = measured.seconds, measured.cpu_seconds, measured.memory
    ways: dict[str, str] = {
        precision: choose_experts_implementation(device, precision, training=True)
        for precision in PRECISIONS
    }
    ratio: dict[str, float] = {}
    rows = []
    for name in steps:
        precision, _, model = name.partition(" ")
        dense = f"{precision} {DENSE}"
        over = median_ratio(seconds[dense], seconds[name])
        over_cpu = median_ratio(cpu_seconds[dense], cpu_seconds[name])
        heavier = memory[name] / memory[dense]
        chosen = model.endswith(f" {ways[precision]}")
        line = [name, 1000 * median(seconds[name]), over, over_cpu, memory[name], heavier]
        rows.append([*line, "yes" * chosen])
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


if __name__ == "__main__":
    main()
