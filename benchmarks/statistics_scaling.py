"""Eight shards of the statistics pass on one and on two Ray workers of one thread.

    python -m benchmarks.statistics_scaling [--repeats N] [--paragraphs N]

The speed-up is given as a share of what two independent processes reach in the same rounds that
only forward the same tokens through the same model, without Ray: cores that share caches, memory
and a power budget do not reach 2 either.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.children import ROOT
from benchmarks.common import alternate, median, parser_of, print_result, print_table, seconds_of
from benchmarks.models import SHAPE, VOCABULARY, save_word_tokenizer
from infra import settings as environment
from infra.recipe.resources import Resources
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.batches import Batch, paragraph_batches, paragraphs, shard_of
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig

SHARDS = 8
LENGTH = 256
CONFIG = StatisticsConfig(sequence_length=LENGTH, batch_size=8, shards=SHARDS)
MODEL = {**SHAPE, "num_key_value_heads": 8}
WORKERS = (1, 2)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--paragraphs", type=int, default=64, help="of 256 tokens, a shard")
    options = parser.parse_args()
    settings = environment.configure()
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        prepare(folder, options.paragraphs)
        measures = {
            **{f"forward {n}": partial(independent_forwards, folder, n) for n in WORKERS},
            **{f"shards {n}": partial(ray_shards, folder, n, settings) for n in WORKERS},
        }
        report(alternate(measures, options.repeats), options.paragraphs)


def prepare(folder: Path, count: int) -> None:
    """A random model as its own backbone, and text for all shards."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).save_pretrained(folder / "expert")
    save_word_tokenizer(folder / "expert")
    reader = CheckpointReader(folder / "expert")
    write_backbone([reader], folder / "backbone", max_shard_bytes=10**9)
    generator = np.random.default_rng(0)
    for split, texts in (("text", SHARDS * count), ("warm-up", SHARDS)):
        ids = generator.integers(1, VOCABULARY, (texts, LENGTH)).tolist()
        documents = ((document, LENGTH) for document in ids)
        write_split(folder / split, documents, eos_id=0, vocabulary_size=VOCABULARY)


def ray_shards(folder: Path, workers: int, settings: environment.Settings) -> float:
    """Seconds of all shards on a Ray of so many CPUs, its worker processes already started."""
    from infra.cluster.compute import cluster, run_pieces
    from infra.cluster.pieces import Piece
    from upcycle_core.dume.statistics import domain_statistics

    def run(split: str, directory: Path) -> None:
        pieces = [
            Piece(
                name=f"{split}-{shard}",
                function=domain_statistics,
                arguments={
                    "backbone": folder / "backbone",
                    "expert": folder / "expert",
                    "corpus": folder / split,
                    "config": CONFIG,
                    "shard": shard,
                    "device": "cpu",
                },
            )
            for shard in range(SHARDS)
        ]
        run_pieces(pieces, directory=directory, resources=Resources(), label="scaling")

    with (
        tempfile.TemporaryDirectory(dir=folder) as directory,
        cluster(settings, workers, ROOT),
    ):
        run("warm-up", Path(directory))
        return seconds_of(partial(run, "text", Path(directory)))


def independent_forwards(folder: Path, workers: int) -> float:
    """Seconds until so many processes have forwarded all shards, an equal part each."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(workers)
    queue = context.Queue()
    parts = [range(first, SHARDS, workers) for first in range(workers)]
    processes = [
        context.Process(target=forward_shards, args=(folder, list(part), barrier, queue))
        for part in parts
    ]
    for process in processes:
        process.start()
    times = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return max(end for _, end in times) - min(start for start, _ in times)


def forward_shards(folder: Path, shards: Sequence[int], barrier: Barrier, queue: Any) -> None:
    """In a process of its own: forward these shards' batches and nothing else."""
    torch.set_num_threads(1)
    model = load_stitched(folder / "backbone", folder / "expert", headless=True)
    texts = [batch for shard in shards for batch in shard_batches(folder / "text", shard)]
    with torch.inference_mode():
        model(input_ids=texts[0].input_ids, use_cache=False)
        barrier.wait()
        start = time.time()
        for batch in texts:
            model(input_ids=batch.input_ids, use_cache=False)
        queue.put((start, time.time()))


def shard_batches(split: Path, shard: int) -> list[Batch]:
    """What the statistics pass forwards for a shard."""
    corpus = TokenCorpus(split)
    pieces = shard_of(paragraphs(corpus, sequence_length=LENGTH), shard, SHARDS)
    return list(paragraph_batches(corpus, pieces, CONFIG.batch_size, folds=CONFIG.parts))


def report(seconds: Mapping[str, list[float]], count: int) -> None:
    """Print the table and the result."""
    speedups = {
        kind: [
            one / two for one, two in zip(seconds[f"{kind} 1"], seconds[f"{kind} 2"], strict=True)
        ]
        for kind in ("forward", "shards")
    }
    shares = [a / b for a, b in zip(speedups["shards"], speedups["forward"], strict=True)]
    names = {"forward": "bare forwards, no Ray", "shards": "statistics pieces, Ray"}
    rows = [
        [name, *(median(seconds[f"{kind} {n}"]) for n in WORKERS), median(speedups[kind])]
        for kind, name in names.items()
    ]
    columns = ["", "one worker s", "two workers s", "speed-up"]
    print_table(f"{SHARDS} shards, one thread a worker, medians of rounds in turns", columns, rows)
    print_result(
        "statistics_scaling",
        median(shares),
        {
            "seconds": seconds,
            "speedups": speedups,
            "shares": shares,
            "tokens": SHARDS * count * LENGTH,
            "shape": MODEL,
        },
    )


if __name__ == "__main__":
    main()
