"""The statistics pass beside a bare headless forward of the same dense model on the same tokens.

    python -m benchmarks.statistics_pass [--size small|135m] [--ways WAY ...]
        [--precisions PRECISION ...] [--repeats N] [--threads N] [--device cpu|cuda]

All ways take turns in one process. ``ragged`` texts have 8 to 256 tokens, so that batches are
padded and rows are gathered; the others fill every paragraph. The published code's way keeps
lm_head and runs every expert of the layer on every token. ``ratio`` is of wall time; CPU time,
which neighbours on the machine disturb less, stands beside it. ``--size 135m`` is SmolLM2-135M's
shape, in four batches of four paragraphs in place of two of sixteen.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.common import (
    Clocks,
    median,
    median_ratio,
    parser_of,
    print_result,
    print_table,
    time_in_turns,
)
from benchmarks.models import SHAPE, VOCABULARY
from benchmarks.training_real import SHAPE as SMOLLM2
from upcycle_core.allocator import kept_memory
from upcycle_core.checkpoints.load import DTYPES
from upcycle_core.corpora.batches import Batch, paragraph_batches, paragraphs
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.collect import Layout, collect
from upcycle_core.progress import Silent

LENGTH = 256
EXPERTS = 3
SIZES: dict[str, dict[str, Any]] = {"small": {**SHAPE, "num_key_value_heads": 8}, "135m": SMOLLM2}
PARAGRAPHS = {"small": 16, "135m": 4}
BATCHES = {"small": 2, "135m": 4}
WAYS = ("bare", "ours", "published")
PRECISIONS = ("fp32", "bf16")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=9, device=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # a small model on a GPU must have enough tokens at once to be more than its kernel launches
    batch_size = PARAGRAPHS[options.size] if options.device == "cpu" else 256
    with tempfile.TemporaryDirectory(prefix="statistics-") as name:
        found = {
            f"{precision} {text}": measure(
                batches(Path(name) / text, text == "ragged", batch_size, BATCHES[options.size]),
                precision,
                options,
            )
            for text in ("full", "ragged")
            for precision in options.precisions
        }
    report(found, options, batch_size)


def batches(folder: Path, ragged: bool, batch_size: int, count: int) -> list[Batch]:
    """Batches of two folds, as the pass reads them from a split on disk."""
    if not folder.exists():
        generator = np.random.default_rng(0)
        sizes = [
            int(generator.integers(8, LENGTH + 1)) if ragged else LENGTH
            for _ in range(count * batch_size)
        ]
        texts = ((generator.integers(1, VOCABULARY, size).tolist(), size) for size in sizes)
        write_split(folder, texts, eos_id=0, vocabulary_size=VOCABULARY)
    corpus = TokenCorpus(folder)
    pieces = paragraphs(corpus, sequence_length=LENGTH)
    return list(paragraph_batches(corpus, pieces, batch_size, folds=2))


def measure(texts: list[Batch], precision: str, options: argparse.Namespace) -> Clocks:
    """What each way takes, in turns."""
    torch.manual_seed(0)
    shape, device = SIZES[options.size], options.device
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=DTYPES[precision])
    model = model.to(device).eval()
    layout = Layout(shape["hidden_size"], tuple(range(shape["num_hidden_layers"])), folds=2)
    calls: dict[str, Callable[[], object]] = {
        "bare": partial(forward, model.model, texts, device),
        "ours": partial(collect, model.model, texts, layout, device=device, progress=Silent()),
        "published": partial(published, model, texts, device),
    }
    asked = {way: call for way, call in calls.items() if way in ("bare", *options.ways)}
    with kept_memory():  # as pieces have it
        return time_in_turns(asked, options.repeats, device=device)


@torch.inference_mode()
def forward(model: nn.Module, texts: list[Batch], device: str) -> None:
    """A model's forward pass and nothing else."""
    for batch in texts:
        model(input_ids=batch.input_ids.to(device), use_cache=False)


class EveryExpert(nn.Module):
    """All experts on every token; the one-hot gate keeps the domain's."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_BSH: Tensor) -> Tensor:
        gate = [1.0] + [0.0] * (EXPERTS - 1)
        return sum((weight * self.mlp(x_BSH) for weight in gate), torch.zeros_like(x_BSH))


def published(model: PreTrainedModel, texts: list[Batch], device: str) -> None:
    """The published code's pass: ones feature, fp32 sums, padding counted."""
    size, layers = model.config.hidden_size + 1, model.get_decoder().layers
    gram = [torch.zeros(size, size, device=device) for _ in layers]
    sums = [torch.zeros(size, EXPERTS, device=device) for _ in layers]
    target = torch.eye(EXPERTS, device=device)[:1]

    def count(index: int, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        x_TH = output.reshape(-1, size - 1).float()
        x_TH = torch.cat([x_TH, torch.ones(len(x_TH), 1, device=device)], 1)
        gram[index] += x_TH.T @ x_TH
        sums[index] += x_TH.T @ target.expand(len(x_TH), -1)

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            hook = layer.post_attention_layernorm.register_forward_hook(partial(count, index))
            stack.callback(hook.remove)
            stack.callback(setattr, layer, "mlp", layer.mlp)
            layer.mlp = EveryExpert(layer.mlp)
        forward(model, texts, device)


def report(found: Mapping[str, Clocks], options: argparse.Namespace, batch_size: int) -> None:
    """Print the table and the result."""
    wall = {name: clocks.wall for name, clocks in found.items()}
    cpu = {name: clocks.cpu for name, clocks in found.items()}
    rows = [
        [name, *map(median, wall[name].values()), *over_bare(wall[name]), *over_bare(cpu[name])]
        for name in found
    ]
    ways = [way for way in WAYS if way in ("bare", *options.ways)]
    columns = ["", *(f"{way} s" for way in ways)]
    columns += [f"{way} / bare{kind}" for kind in ("", ", CPU time") for way in ways[1:]]
    print_table(f"statistics pass on {options.device}, medians of rounds in turns", columns, rows)
    print_result(
        "statistics_pass",
        {precision: over_bare(wall[f"{precision} full"])[0] for precision in options.precisions},
        {
            "wall_s": wall,
            "cpu_s": cpu,
            "ratios": {name: over_bare(ways) for name, ways in wall.items()},
            "cpu_ratios": {name: over_bare(ways) for name, ways in cpu.items()},
            "shape": SIZES[options.size],
            "batch": [batch_size, LENGTH],
        },
    )


def over_bare(ways: Mapping[str, list[float]]) -> list[float]:
    """Each way that was asked for, divided by the bare forward of the same round."""
    return [median_ratio(times, ways["bare"]) for way, times in ways.items() if way != "bare"]


if __name__ == "__main__":
    main()
