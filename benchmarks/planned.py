"""Peak memory as planned beside what is measured, of a piece of each kind.

    python -m benchmarks.planned [--size 1m|135m|1b|3b|8b] [--kinds NAME ...] [--precision auto]
                                 [--device cuda] [--together N] [--checkpoints FOLDER]

Models of that shape with random weights and text are made in a temporary folder. Each piece is a
process of its own; its memory is the peak of anonymous memory above that of the imports, or on a
GPU the most that its allocator has given out, which is what ``upcycle_core.planning`` says from
config.json alone. Several pieces at once share the machine: their seconds are no measurement.
What trainings write may be more than one disk holds: their checkpoints can go to another.
"""

import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.children import call_in_child
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.models import write_llama
from benchmarks.pieces import (
    ALONE,
    ANSWERS,
    CHECKPOINTS,
    EXPERTS,
    LENGTH,
    ON_A_GPU,
    PIECES,
    SHARD,
    TOKENS,
    keep_few_kernels,
    make_sparse,
    plan,
    write_texts,
)
from upcycle_core.backbone.average import write_backbone
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
    "8b": {
        "hidden": 4096,
        "inner": 14336,
        "layers": 32,
        "heads": 32,
        "kv": 8,
        "vocabulary": 128256,
        "tied": False,
    },
}
"""Shapes: the demo's, SmolLM2-135M's, Llama-3.2-1B's and -3B's, Llama-3.1-8B's."""


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", type=int, default=1, help="pieces at once")
    parser.add_argument("--checkpoints", type=Path, help="a folder on another disk")
    parser.add_argument("--size", choices=[*SIZES], default="135m")
    parser.add_argument("--kinds", nargs="+", choices=[*PIECES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    kinds = options.kinds or [*(PIECES if options.device == "cpu" else ON_A_GPU)]
    if options.kinds is None and 2 * SIZES[options.size]["inner"] > TOKENS:
        kinds.remove("repair")  # it regresses on more text
    if options.kinds is None and options.size in ("3b", "8b"):
        kinds.remove(ANSWERS)  # its model is made in the memory of this process, in fp32
    keep_few_kernels()
    found: dict[str, dict[str, float]] = {}
    rows, failed = [], {}
    place = partial(tempfile.TemporaryDirectory, prefix="planned-")
    with place() as name, place(dir=options.checkpoints) as other:
        folder = Path(name)
        make(folder, SIZES[options.size], is_alone=set(kinds) <= ALONE)
        if ANSWERS in kinds:
            make_sparse(folder)
        (folder / CHECKPOINTS).symlink_to(other)
        with ThreadPoolExecutor(options.together) as pool:
            calls = {
                kind: pool.submit(
                    partial(call_in_child, piece, kind, folder, options.precision, options.device),
                    threads=options.threads,
                )
                for kind in kinds
            }
        shape = Shape.of(folder / "one")
        for kind, call in calls.items():
            try:
                child = call.result()
            except RuntimeError as error:  # the others have taken long, too
                failed[kind] = str(error)
                continue
            measured, base = child["memory_mb"], 0.0 if child["gpu_mb"] else child["before_mb"]
            planned = plan(kind, shape, options.precision, options.device) / 1e6
            found[kind] = {"planned_mb": planned, "memory_mb": measured, "before_mb": base}
            found[kind]["seconds"] = child["seconds"]
            whole = (base + planned) / (base + measured)
            rows.append([kind, planned, measured, planned / measured, whole, child["seconds"]])
    head = ["", "planned MB", "measured MB", "planned / measured", "with imports", "seconds"]
    print_table(f"{options.size}, peak memory above the imports", head, rows)
    ratios = {kind: own["planned_mb"] / own["memory_mb"] for kind, own in found.items()}
    print_result("planned", ratios, {"pieces": found, "size": options.size})
    if failed:
        sys.exit("\n".join(f"{kind}: {said}" for kind, said in failed.items()))


def make(folder: Path, size: Mapping[str, int], *, is_alone: bool) -> None:
    """Two experts in bf16 and what is made of them, or one alone, and text, a tensor at a time."""
    for seed, name in enumerate(EXPERTS[:1] if is_alone else EXPERTS):
        write_llama(folder / name, size, seed=seed, shard=SHARD)
    generator, words = np.random.default_rng(0), size["vocabulary"]
    rows = (generator.integers(0, words, LENGTH).tolist() for _ in range(TOKENS // LENGTH))
    write_texts(folder, words)
    write_split(folder / "text", ((row, LENGTH) for row in rows), eos_id=0, vocabulary_size=words)
    if is_alone:
        return
    paths = {name: folder / name for name in EXPERTS}
    readers = [CheckpointReader(path) for path in paths.values()]
    write_backbone(readers, folder / "backbone", max_shard_bytes=SHARD)
    routers = random_routers(size["layers"], size["hidden"], len(EXPERTS), seed=0)
    out = folder / "moe"
    assemble(paths, folder / "backbone", routers, out, top_k=1, max_shard_bytes=SHARD)


def piece(kind: str, folder: Path, precision: str, device: str) -> dict[str, float]:
    """What the child does."""
    began = time.perf_counter()
    PIECES[kind](folder, precision, device)
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
