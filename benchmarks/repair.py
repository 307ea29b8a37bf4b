"""Repair in closed form beside the statistics pass on the same text.

    python -m benchmarks.repair [--repeats N] [--tokens N] [--threads N] [--ways repair]

Shape of SmolLM2-135M (``benchmarks.training_real``) and random weights, but such that there is
something to repair, as between real experts: how many lambdas are tried follows from it. Embeddings
share a direction, what two experts differ by is largely one linear map, and tokens are as rare as
Zipf's law has them.

Each way is a process of its own, in turns: the statistics of one domain as one shard, and the
repair of its expert with the head's target, both with loading and writing; and the two parts of a
head that is fitted to three experts, the moments of one domain's states, and the head itself, which
is fitted once for all domains: each domain's tokens are rare by a factor of their own. Memory is
the peak of anonymous memory above that of the imports.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.children import call_in_child
from benchmarks.common import alternate, median, median_ratio, parser_of, print_result, print_table
from benchmarks.training_real import SHAPE, make_model
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.counts import frequencies
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.repair import repair_expert
from upcycle_core.dume.shared_head import final_moments, fitted_head
from upcycle_core.dume.statistics import domain_statistics

LENGTH, BATCH = 512, 4
WAYS = ("statistics", "repair", "moments", "fitted head")
EXPERTS = 3
DIFFERENCE, NOISE = 0.1, 0.05
"""Of the linear map by which two experts differ, and of what is drawn for each weight alone."""
CALIBRATION = 200_000
"""Tokens that frequencies are counted from."""


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:], help="beside it")
    options = parser.parse_args()
    config = StatisticsConfig(
        tokens=options.tokens,
        sequence_length=LENGTH,
        batch_size=BATCH,
        shards=1,
        precision=options.precision,
    )
    with tempfile.TemporaryDirectory(prefix="repair-") as name:
        folder = Path(name)
        make_models(folder)
        make_text(folder / "text", options.tokens)
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            way: partial(call_in_child, call, folder, config, threads=options.threads)
            for way, call in zip(WAYS, (statistics, repair, moments, head), strict=True)
            if way in ("statistics", *options.ways)
        }
        report(alternate(calls, options.repeats), options.tokens)


def make_models(folder: Path) -> None:
    """Two experts, and the backbone between them."""
    make_model(folder / "one")
    size = SHAPE["hidden_size"]
    draw = torch.Generator().manual_seed(0)
    turn_HH = DIFFERENCE * torch.randn(size, size, generator=draw) / size**0.5
    with quiet_loading(), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "one", dtype=torch.float32)
        embedding_VH = model.model.embed_tokens.weight
        embedding_VH += embedding_VH.std() * torch.randn(size, generator=draw)
        model.save_pretrained(folder / "one")
        for weight in (weight for weight in model.parameters() if weight.dim() == 2):
            noise = NOISE * weight.std() * torch.randn(weight.shape, generator=draw)
            if weight.shape[1] == size:
                weight += weight @ turn_HH
            weight += noise
        model.save_pretrained(folder / "other")
    readers = [CheckpointReader(folder / name) for name in ("one", "other")]
    write_backbone(readers, folder / "backbone", max_shard_bytes=10**10)


def make_text(directory: Path, tokens: int) -> None:
    """Documents of a paragraph each."""
    generator = np.random.default_rng(0)
    count = -(-tokens // LENGTH)
    rarity_V = rarity().numpy()
    share_V = rarity_V / rarity_V.sum()
    size = len(share_V)
    texts = ((generator.choice(size, LENGTH, p=share_V).tolist(), LENGTH) for _ in range(count))
    write_split(directory, texts, eos_id=0, vocabulary_size=size)


def rarity() -> torch.Tensor:
    """How often each token of the vocabulary is used beside the others, [V] fp64: Zipf's law."""
    return 1 / (10 + torch.arange(SHAPE["vocab_size"], dtype=torch.float64))


def statistics(folder: Path, config: StatisticsConfig) -> dict[str, float]:
    """The pass that routers are solved from."""
    out, parts = folder / "statistics.safetensors", (folder / "backbone", folder / "one")
    started = time.perf_counter()
    domain_statistics(*parts, folder / "text", out, config=config, shard=0)
    return {"seconds": time.perf_counter() - started}


def repair(folder: Path, config: StatisticsConfig) -> dict[str, float]:
    """The repair of one expert."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as out:
        said = repair_expert(
            *(folder / "backbone", folder / "one", folder / "text", Path(out)),
            repair="down+head_target",
            config=config,
            max_shard_bytes=10**10,
        )
        seconds = time.perf_counter() - started
    factors = [layer["lambda"] for layer in said if layer["lambda"] is not None]
    return {"seconds": seconds, "lambda": median(factors or [0.0]), "repaired": len(factors)}


def moments(folder: Path, config: StatisticsConfig) -> dict[str, float]:
    """What a fitted head knows of one domain's states."""
    started = time.perf_counter()
    final_moments(folder / "one", folder / "text", config=config)
    return {"seconds": time.perf_counter() - started}


def head(folder: Path, config: StatisticsConfig) -> dict[str, float]:
    """A head fitted to all experts."""
    size, hidden = SHAPE["vocab_size"], SHAPE["hidden_size"]
    draw = torch.Generator().manual_seed(0)
    rarity_V = rarity()
    counts, heads, seconds = [], [], []
    shared = torch.randn(size, hidden, generator=draw)
    mixing = torch.randn(hidden, hidden, generator=draw) / hidden**0.5
    spread_H = torch.logspace(0, -1.5, hidden)
    for _ in range(EXPERTS):
        own_V = rarity_V * torch.randn(size, generator=draw).mul(1.5).exp()
        counts.append(torch.poisson(own_V / own_V.sum() * CALIBRATION, generator=draw))
        heads.append(shared + 0.1 * torch.randn(size, hidden, generator=draw))
        turn = torch.eye(hidden) + mixing + 0.3 * torch.randn(mixing.shape, generator=draw) * 0.04
        states = torch.randn(4 * hidden, hidden, generator=draw) * spread_H @ turn
        seconds.append((states.T @ states / len(states)).double())
    started = time.perf_counter()
    fitted_head(heads, frequencies(counts), seconds)
    return {"seconds": time.perf_counter() - started}


def report(found: dict[str, list[dict[str, Any]]], tokens: int) -> None:
    """Print the table and the result."""
    figures = {
        name: {way: [one[name] for one in rounds] for way, rounds in found.items()}
        for name in ("seconds", "memory_mb")
    }
    rows = [[way, *(median(figures[name][way]) for name in figures)] for way in found]
    ratios: dict[str, float] = {}
    for way in [way for way in found if way != "statistics"]:
        own = {n: median_ratio(f[way], f["statistics"]) for n, f in figures.items()}
        rows.append([f"{way} / statistics", *own.values()])
        ratios |= {f"{way} {name}": ratio for name, ratio in own.items()}
    print_table(f"{tokens:,} tokens of a domain, medians", ["", "s", "MB"], rows)
    repairs = found.get("repair", [])
    chosen = {n: median([one[n] for one in repairs]) for n in ("lambda", "repaired") if repairs}
    print_result("repair", ratios, {**figures, **chosen, "tokens": tokens, "shape": SHAPE})


if __name__ == "__main__":
    main()
