"""Peak memory as planned beside what is measured, of a piece of each kind.

    python -m benchmarks.planned [--size 1m|135m|1b|3b] [--kinds NAME ...] [--precision auto]

Models of that shape with random weights and text are made in a temporary folder. Each piece is a
process of its own; its memory is the peak of anonymous memory above that of the imports, which is
what ``upcycle_core.planning`` says from config.json alone.
"""

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.children import call_in_child
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.models import llama_of, save_word_tokenizer
from benchmarks.pieces import (
    EXPERTS,
    LENGTH,
    PIECES,
    SHARD,
    TOKENS,
    keep_few_kernels,
    plan,
    write_texts,
)
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.planning.shape import Shape

SIZES: Mapping[str, Mapping[str, int]] = {
    "1m": {"hidden": 128, "inner": 384, "layers": 4, "heads": 4, "kv": 2, "vocabulary": 4096},
    "135m": {"hidden": 576, "inner": 1536, "layers": 30, "heads": 9, "kv": 3, "vocabulary": 49152},
    "1b": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv": 8, "vocabulary": 128256},
    "3b": {"hidden": 3072, "inner": 8192, "layers": 28, "heads": 24, "kv": 8, "vocabulary": 128256},
}
"""Shapes: the demo's, SmolLM2-135M's, Llama-3.2-1B's and -3B's."""


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=[*SIZES], default="135m")
    parser.add_argument("--kinds", nargs="+", choices=[*PIECES], default=[*PIECES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    keep_few_kernels()
    found, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="planned-") as name:
        folder = Path(name)
        make(folder, SIZES[options.size])
        for kind in options.kinds:
            call = partial(call_in_child, piece, kind, folder, options.precision)
            child = call(threads=options.threads)
            measured, base = child["memory_mb"], child["before_mb"]
            planned = plan(kind, Shape.of(folder / "one"), options.precision) / 1e6
            found[kind] = {"planned_mb": planned, "memory_mb": measured, "before_mb": base}
            found[kind]["seconds"] = child["seconds"]
            whole = (base + planned) / (base + measured)
            rows.append([kind, planned, measured, planned / measured, whole, child["seconds"]])
    head = ["", "planned MB", "measured MB", "planned / measured", "with imports", "seconds"]
    print_table(f"{options.size}, peak memory above the imports", head, rows)
    ratios = {kind: own["planned_mb"] / own["memory_mb"] for kind, own in found.items()}
    print_result("planned", ratios, {"pieces": found, "size": options.size})


def make(folder: Path, size: Mapping[str, int]) -> None:
    """Two experts in bf16, what is made of them, and text; one model is held at a time."""
    config = llama_of(size, dtype="bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    for seed, name in enumerate(EXPERTS):
        torch.manual_seed(seed)
        with quiet_loading():
            LlamaForCausalLM(config).save_pretrained(folder / name)
        save_word_tokenizer(folder / name, words=size["vocabulary"])
    torch.set_default_dtype(torch.float32)
    paths = {name: folder / name for name in EXPERTS}
    readers = [CheckpointReader(path) for path in paths.values()]
    write_backbone(readers, folder / "backbone", max_shard_bytes=SHARD)
    routers = random_routers(size["layers"], size["hidden"], len(EXPERTS), seed=0)
    out = folder / "moe"
    assemble(paths, folder / "backbone", routers, out, top_k=1, max_shard_bytes=SHARD)
    generator, words = np.random.default_rng(0), size["vocabulary"]
    rows = (generator.integers(0, words, LENGTH).tolist() for _ in range(TOKENS // LENGTH))
    write_texts(folder, words)
    write_split(folder / "text", ((row, LENGTH) for row in rows), eos_id=0, vocabulary_size=words)


def piece(kind: str, folder: Path, precision: str) -> dict[str, float]:
    """What the child does."""
    began = time.perf_counter()
    PIECES[kind](folder, precision)
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
