"""Stage 1 of Symphony-MoE beside a bare forward of both models on the same tokens.

    python -m benchmarks.alignment [--repeats N] [--threads N] [--device cpu|cuda]

Two random Llamas. All ways of the pass take turns in one process: both models alone; with the
cross-moments of all neurons, features in bf16 (as by default) or fp32; with those of heads and of
the residual stream as well. ``ratio`` is (forward + accumulation) / forward of wall time; CPU time,
which neighbours on the machine disturb less, stands beside it. Then assignment problems of all
layers, one after another and by one process a core, and one model written in its new order.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import (
    Clocks,
    alternate,
    median,
    median_ratio,
    parser_of,
    print_result,
    print_table,
    seconds_of,
    time_in_turns,
)
from benchmarks.models import SHAPE, VOCABULARY, save_word_tokenizer
from upcycle_core.activations.cross import CrossMoments, similarity
from upcycle_core.activations.pairs import (
    PairedBatch,
    collect_pairs,
    head_reader,
    neuron_reader,
    residual_readers,
)
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.backbone.residual import unit_rows
from upcycle_core.backbone.rewrite import rewrite
from upcycle_core.checkpoints.load import load_causal_lm, quiet_loading
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.progress import Silent
from upcycle_core.symphony.assignment import assign, permute_neurons
from upcycle_core.symphony.config import CalibrationConfig
from upcycle_core.symphony.moments import collect_moments, layer_moments
from upcycle_core.symphony.texts import paired_texts

GOAL = 1.25
LENGTH, BATCHES = 256, 1
MODEL = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
LAYERS = tuple(range(MODEL["num_hidden_layers"]))
FAMILY = FAMILIES["llama"]
# What is counted beside the bare forward, and in which type.
WAYS = {
    "neurons": (False, torch.bfloat16),
    "neurons, fp32 features": (False, torch.float32),
    "neurons, heads, residual": (True, torch.bfloat16),
}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=7, device=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # a small model on a GPU must have enough tokens at once to be more than its kernel launches
    batch_size = 16 if options.device == "cpu" else 256
    with tempfile.TemporaryDirectory(prefix="alignment-") as name:
        folder = Path(name)
        config = make(folder, batch_size)
        passes = measure_passes(folder, config, options.device, options.repeats)
        steps = measure_steps(folder, config, options.device, options.repeats)
    report(passes, steps, options.device, batch_size)


def make(folder: Path, batch_size: int) -> CalibrationConfig:
    """Two models with one tokenizer of words, and one domain's text."""
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        with quiet_loading():
            AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).save_pretrained(folder / name)
        save_word_tokenizer(folder / name, end=None)
    drawn = np.random.default_rng(0).integers(VOCABULARY, size=(BATCHES * batch_size, LENGTH))
    texts = pyarrow.array([" ".join(f"w{index}" for index in row) for row in drawn])
    parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet")
    return CalibrationConfig(tokens=drawn.size, sequence_length=LENGTH, batch_size=batch_size)


def measure_passes(folder: Path, config: CalibrationConfig, device: str, repeats: int) -> Clocks:
    """What each way takes, in turns."""
    both = [load_causal_lm(folder / name, device=device).get_decoder() for name in "ab"]
    paired = paired_texts(
        {"text": folder / "text.parquet"}, folder / "a", folder / "b", config=config
    )
    batches = list(paired.batches())
    calls: dict[str, Callable[[], object]] = {"forward": partial(forward, both, batches)}
    for way, (everything, dtype) in WAYS.items():
        calls[way] = partial(collect, both, batches, everything, dtype)
    return time_in_turns(calls, repeats, device=device)


@torch.no_grad()
def forward(both: Sequence[nn.Module], batches: Sequence[PairedBatch]) -> None:
    """Both models' forward passes and nothing else."""
    device = next(both[0].parameters()).device
    for batch in batches:
        for model, ids in zip(both, (batch.first_ids, batch.second_ids), strict=True):
            model(input_ids=ids.to(device), use_cache=False)


def collect(
    both: Sequence[nn.Module], batches: Sequence[PairedBatch], everything: bool, dtype: torch.dtype
) -> None:
    """The pass of ``symphony.moments``, without reading models and writing sums."""
    device = next(both[0].parameters()).device
    stream = residual_readers(FAMILY, LAYERS) if everything else []
    sums = dict.fromkeys(stream, CrossMoments(MODEL["hidden_size"], device=device))
    for layer in LAYERS:
        if everything:
            sums[head_reader(layer)] = CrossMoments(MODEL["hidden_size"], device=device)
        size = MODEL["intermediate_size"]
        sums[neuron_reader(FAMILY, layer)] = CrossMoments(size, device=device)

    def change(path: str, x: Tensor) -> Tensor:
        return (unit_rows(x) if path in stream else x).to(dtype)

    collect_pairs(both[0], both[1], batches, sums, change=change, progress=Silent())


def measure_steps(
    folder: Path, config: CalibrationConfig, device: str, repeats: int
) -> dict[str, list[float]]:
    """Seconds of what follows the pass: all layers' assignments both ways, one model written."""
    file, texts = folder / "sums.safetensors", {"text": folder / "text.parquet"}
    collect_moments(
        folder / "a", folder / "b", texts, file, config=config, layers=LAYERS, device=device
    )
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(1, initializer=torch.set_num_threads, initargs=(1,)) as one,
        context.Pool(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as every,
    ):
        orders = dict(zip(LAYERS, assign_all(one, file), strict=True))
        for _ in range(3):  # until every process has imported what it needs
            assign_all(every, file)
        calls: dict[str, Callable[[], object]] = {
            "assignment, one process": partial(assign_all, one, file),
            "assignment, all cores": partial(assign_all, every, file),
            "writing": partial(write, folder, orders),
        }
        measures = {step: partial(seconds_of, call) for step, call in calls.items()}
        return alternate(measures, repeats)


def assign_all(pool: Pool, file: Path) -> list[Tensor]:
    """Every layer's order of neurons; a process takes the next layer when it has done one."""
    return [
        torch.tensor(order) for order in pool.map(partial(assign_one, file), LAYERS, chunksize=1)
    ]


def assign_one(file: Path, layer: int) -> list[int]:
    """One layer, from its sums on the disk to the order of its neurons."""
    return assign(similarity(layer_moments(file, "neurons", layer), "correlation")).order.tolist()


def write(folder: Path, orders: Mapping[int, Tensor]) -> None:
    """Stream one model into its new order, to the disk."""
    reader = CheckpointReader(folder / "b")
    changes = [permute_neurons(FAMILY, orders)]
    rewrite(reader, folder / "aligned", changes, untie=False, max_shard_bytes=10**9)


def report(
    passes: Clocks,
    steps: Mapping[str, list[float]],
    device: str,
    batch_size: int,
) -> None:
    """Print the tables and the result."""
    wall, cpu = passes.wall, passes.cpu
    over = {
        kind: {way: median_ratio(found[way], found["forward"]) for way in WAYS}
        for kind, found in (("wall", wall), ("cpu", cpu))
    }
    rows = [["forward of both", median(wall["forward"]), 0.0, 1.0, 1.0]]
    for way in WAYS:
        added = median(wall[way]) - median(wall["forward"])
        rows.append([way, median(wall[way]), added, over["wall"][way], over["cpu"][way]])
    columns = ["pass", "s", "accumulation s", "/ forward", "/ forward, CPU time"]
    tokens = BATCHES * batch_size * LENGTH
    print_table(f"{tokens} tokens on {device}, medians of rounds in turns", columns, rows)
    names = ("assignment, one process", "assignment, all cores")
    speedup = median_ratio(*(steps[name] for name in names))
    seconds = [[step, median(times)] for step, times in steps.items()]
    print_table(f"then, {len(LAYERS)} layers (medians)", ["step", "s"], seconds)
    goals = [
        [
            f"(forward + {way}) / forward",
            ratio,
            f"<= {GOAL}: {'met' if ratio <= GOAL else 'missed'}",
        ]
        for way, ratio in over["wall"].items()
    ]
    goals.append(["assignment, one process / all cores", speedup, f"{os.cpu_count()} cores"])
    print_table("ratio", ["", "value", "goal"], goals)
    print_result(
        "alignment",
        {**over["wall"], "assignment on all cores": speedup},
        {
            "wall_s": wall,
            "cpu_s": cpu,
            "cpu_ratios": over["cpu"],
            "steps_s": steps,
            "shape": MODEL,
            "batch": [batch_size, LENGTH],
        },
    )


if __name__ == "__main__":
    main()
