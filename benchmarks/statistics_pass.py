"""The statistics pass beside a bare headless forward of the same dense model on the same tokens.

    python -m benchmarks.statistics_pass [--repeats N] [--threads N] [--device cpu|cuda]

All ways take turns in one process. ``ragged`` texts have 8 to 256 tokens, so that batches are
padded and rows are gathered; the others fill every paragraph. The published code's way keeps
lm_head and runs every expert of the layer on every token. ``ratio`` is of wall time; CPU time,
which neighbours on the machine disturb less, stands beside it.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

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
from upcycle_core.checkpoints.load import DTYPES
from upcycle_core.corpora.batches import Batch, paragraph_batches, paragraphs
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.collect import Layout, collect
from upcycle_core.progress import Silent

LENGTH = 256
EXPERTS = 3
MODEL = {**SHAPE, "num_key_value_heads": 8}
WAYS = ("bare", "ours", "published")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=9, device=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # a small model on a GPU must have enough tokens at once to be more than its kernel launches
    batch_size = 16 if options.device == "cpu" else 256
    with tempfile.TemporaryDirectory(prefix="statistics-") as name:
        found = {
            f"{precision} {text}": measure(
                batches(Path(name) / text, text == "ragged", batch_size),
                precision,
                options.device,
                options.repeats,
            )
            for text in ("full", "ragged")
            for precision in ("fp32", "bf16")
        }
    report(found, options.device, batch_size)


def batches(folder: Path, ragged: bool, batch_size: int) -> list[Batch]:
    """One batch a fold, as the pass reads them from a split on disk."""
    if not folder.exists():
        generator = np.random.default_rng(0)
        sizes = [
            int(generator.integers(8, LENGTH + 1)) if ragged else LENGTH
            for _ in range(2 * batch_size)
        ]
        texts = ((generator.integers(1, VOCABULARY, size).tolist(), size) for size in sizes)
        write_split(folder, texts, eos_id=0, vocabulary_size=VOCABULARY)
    corpus = TokenCorpus(folder)
    pieces = paragraphs(corpus, sequence_length=LENGTH)
    return list(paragraph_batches(corpus, pieces, batch_size, folds=2))


def measure(texts: list[Batch], precision: str, device: str, repeats: int) -> Clocks:
    """What each way takes, in turns."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**MODEL), dtype=DTYPES[precision])
    model = model.to(device).eval()
    layout = Layout(MODEL["hidden_size"], tuple(range(MODEL["num_hidden_layers"])), folds=2)
    calls: dict[str, Callable[[], object]] = {
        "bare": partial(forward, model.model, texts, device),
        "ours": partial(collect, model.model, texts, layout, device=device, progress=Silent()),
        "published": partial(published, model, texts, device),
    }
    return time_in_turns(calls, repeats, device=device)


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
    size, layers = MODEL["hidden_size"] + 1, model.get_decoder().layers
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


def report(found: Mapping[str, Clocks], device: str, batch_size: int) -> None:
    """Print the table and the result."""
    wall = {name: clocks.wall for name, clocks in found.items()}
    cpu = {name: clocks.cpu for name, clocks in found.items()}
    rows = [
        [name, *map(median, wall[name].values()), *over_bare(wall[name]), *over_bare(cpu[name])]
        for name in found
    ]
    columns = ["", *(f"{way} s" for way in WAYS)]
    columns += [f"{way} / bare{kind}" for kind in ("", ", CPU time") for way in WAYS[1:]]
    print_table(f"statistics pass on {device}, medians of rounds in turns", columns, rows)
    print_result(
        "statistics_pass",
        {precision: over_bare(wall[f"{precision} full"])[0] for precision in ("fp32", "bf16")},
        {
            "wall_s": wall,
            "cpu_s": cpu,
            "ratios": {name: over_bare(ways) for name, ways in wall.items()},
            "cpu_ratios": {name: over_bare(ways) for name, ways in cpu.items()},
            "shape": MODEL,
            "batch": [batch_size, LENGTH],
        },
    )


def over_bare(ways: Mapping[str, list[float]]) -> list[float]:
    """Ours and the published way, divided by the bare forward of the same round."""
    return [median_ratio(ways[way], ways["bare"]) for way in WAYS[1:]]


if __name__ == "__main__":
    main()
