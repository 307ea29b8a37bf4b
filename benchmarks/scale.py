"""Averaging, assembly, statistics, scoring and repair at growing size, under a limit of memory.

    python -m benchmarks.scale [--size small|135m|1b|3b|8b] [--rows NAME ...] [--limit-gb N]
                               [--device cuda]

Experts of that shape with random bf16 weights are written tensor by tensor into a temporary folder,
which goes with the benchmark. Each row is a process of its own; its memory is the peak of anonymous
memory above that of the imports, beside what ``upcycle_core.planning`` says; a row that is planned
to take more than ``--limit-gb`` is not run, and one that fails is said at the end. The kernel's
limit (RLIMIT_DATA) is that and twice all weights, since mapped ones count there: where weights are
many it is loose, and the measured figure is what counts. On a GPU memory is the most that its
allocator has given out, of the rows that run there, and the kernel sets no limit.
Statistics are timed beside a bare headless forward of the same model and text, assembly beside
``cp`` of its result; both include bringing it to the disk.
"""

import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.children import call_in_child
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.models import write_llama
from benchmarks.pieces import keep_few_kernels
from benchmarks.planned import SIZES
from upcycle_core.allocator import kept_memory
from upcycle_core.backbone.average import write_average, write_backbone
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.collect import shard_batches
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.repair import repair_expert
from upcycle_core.dume.statistics import domain_statistics
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import evaluate_checkpoint
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.planning import memory
from upcycle_core.planning.shape import Shape

EXPERTS = {"one": "one", "other": "other", "third": "one", "fourth": "other"}
"""Expert to the checkpoint that it is: two are enough, what is read and written is the same."""
LENGTH, BATCH = 512, 2
SHARD = 2 * 10**9
MEMORY = ("memory_mb", "planned_mb")
NAN = float("nan")
SMALL = {"small": SIZES["1m"]}
STATISTICS: Any = {"sequence_length": LENGTH, "batch_size": BATCH, "precision": "bf16"}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=["small", "135m", "1b", "3b", "8b"], default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--limit-gb", type=float, default=2.5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    keep_few_kernels()
    found: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        size = (SMALL | dict(SIZES))[options.size]
        least = 2 * size["inner"] if "repair" in options.rows else 0  # what a regression takes
        tokens = max(options.tokens, -(-least // LENGTH) * LENGTH)
        make(folder, size, tokens, is_alone=not MERGED & set(options.rows))
        planned = plans(Shape.of(folder / "one"), tokens, options.device)
        for row in options.rows:
            if planned.get(row, 0) > options.limit_gb * 1e9:
                found[row] = {"planned_mb": planned[row] / 1e6}
                print(row, f"would take {planned[row] / 1e9:.1f} GB: not run", flush=True)
                continue
            call = partial(call_in_child, measured, row, folder, options.device, options.limit_gb)
            found[row] = {"planned_mb": planned[row] / 1e6} if row in planned else {}
            try:
                facts = call(threads=options.threads)
            except RuntimeError as error:  # the other rows have taken long, too
                failed[row] = str(error).splitlines()[-1]
            else:
                found[row] |= {name: facts[name] for name in ("seconds", "memory_mb")}
            print(row, *(f"{name} {value:.1f}" for name, value in found[row].items()), flush=True)
    report(found, options.size, options.limit_gb)
    if failed:
        sys.exit("\n".join(f"{row}: {line}" for row, line in failed.items()))


def report(found: Mapping[str, Mapping[str, float]], size: str, limit_gb: float) -> None:
    """Print the table and the result."""

    def seconds(row: str) -> float:
        return found.get(row, {}).get("seconds", NAN)

    rows = []
    for name, own in found.items():
        beside = BESIDE.get(name, "")
        times = seconds(name) / seconds(beside)
        rows.append([name, seconds(name), times, *(own.get(of, NAN) for of in MEMORY)])
    head = ["", "s", "s / yardstick", "memory MB", "planned MB"]
    print_table(f"{size}, at most {limit_gb} GB a process", head, rows)
    ratios = {
        name: ratio
        for name, beside in BESIDE.items()
        if not math.isnan(ratio := seconds(name) / seconds(beside))
    }
    print_result("scale", ratios, {"rows": found, "size": size, "limit_gb": limit_gb})


def make(folder: Path, size: Mapping[str, int], tokens: int, *, is_alone: bool) -> None:
    """Two experts, or one, their backbone, and text; a tensor is held at a time."""
    names = ["one"] if is_alone else sorted(set(EXPERTS.values()))
    for seed, name in enumerate(names):
        write_llama(folder / name, size, seed=seed, shard=SHARD)
    readers = [CheckpointReader(folder / name) for name in names]
    write_backbone(readers, folder / "backbone", max_shard_bytes=SHARD)
    generator, words = np.random.default_rng(0), size["vocabulary"]
    texts = (generator.integers(0, words, LENGTH).tolist() for _ in range(tokens // LENGTH))
    write_split(folder / "text", ((t, LENGTH) for t in texts), eos_id=0, vocabulary_size=words)


def averaging(folder: Path, device: str) -> None:
    """Of both experts, whole."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        readers = [CheckpointReader(folder / name) for name in set(EXPERTS.values())]
        write_average(readers, Path(out), max_shard_bytes=SHARD)


def assembly(folder: Path, device: str) -> None:
    """Of four experts; its result stays for the rows behind it."""
    config = CheckpointReader(folder / "one").config
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    routers = random_routers(layers, hidden, len(EXPERTS), seed=0)
    paths = {name: folder / own for name, own in EXPERTS.items()}
    common: dict[str, Any] = {"top_k": 1, "max_shard_bytes": SHARD}
    assemble(paths, folder / "backbone", routers, folder / "moe", **common)


def copying(folder: Path, device: str) -> None:
    """``cp`` of what was assembled, brought to the disk."""
    copy = folder / "copy"
    subprocess.run(["cp", "-r", str(folder / "moe"), str(copy)], check=True)
    subprocess.run(["sync", *map(str, copy.iterdir())], check=True)
    shutil.rmtree(copy)


def bare(folder: Path, device: str) -> None:
    """A headless forward of the statistics pass's model and batches, its loading included."""
    parts, config = (folder / "backbone", folder / "one"), StatisticsConfig(shards=1, **STATISTICS)
    model = load_stitched(*parts, headless=True, dtype=torch.bfloat16, device=device)
    with torch.inference_mode():
        for batch in shard_batches(folder / "text", config, 0)[0]:
            model(input_ids=batch.input_ids.to(device), use_cache=False)
    if device != "cpu":
        torch.cuda.synchronize()


def statistics(folder: Path, device: str, *, streamed: bool) -> None:
    """One domain's, as one shard."""
    parts = (folder / "backbone", folder / "one", folder / "text")
    config = StatisticsConfig(shards=1, **STATISTICS)
    layers = folder / "layers" if streamed else None
    common: dict[str, Any] = {"config": config, "streamed": layers, "device": device}
    domain_statistics(*parts, folder / "sums", shard=0, **common)


def scoring(folder: Path, device: str, *, model: str, streamed: bool) -> None:
    """A model's perplexity."""
    config = EvaluationConfig(**STATISTICS)
    layers = folder / "layers" if streamed else None
    common: dict[str, Any] = {"config": config, "streamed": layers, "device": device}
    evaluate_checkpoint(folder / model, {"text": folder / "text"}, **common)


def repair(folder: Path, device: str) -> None:
    """One expert's."""
    config = StatisticsConfig(shards=1, **STATISTICS)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        parts = (folder / "backbone", folder / "one", folder / "text", Path(out))
        common: dict[str, Any] = {"config": config, "max_shard_bytes": SHARD, "device": device}
        repair_expert(*parts, repair="down", **common)


ROWS: Mapping[str, Callable[[Path, str], None]] = {
    "averaging": averaging,
    "assembly": assembly,
    "cp": copying,
    "bare forward": bare,
    "statistics, whole": partial(statistics, streamed=False),
    "statistics, streamed": partial(statistics, streamed=True),
    "scoring, whole": partial(scoring, model="one", streamed=False),
    "scoring, streamed": partial(scoring, model="one", streamed=True),
    "scoring the MoE, whole": partial(scoring, model="moe", streamed=False),
    "scoring the MoE, streamed": partial(scoring, model="moe", streamed=True),
    "repair": repair,
}
MERGED = {name for name in ROWS if "MoE" in name} | {"averaging", "assembly", "cp"}
"""What needs several experts."""
BESIDE = {
    "assembly": "cp",
    "statistics, whole": "bare forward",
    "statistics, streamed": "bare forward",
    "scoring, streamed": "scoring, whole",
    "scoring the MoE, streamed": "scoring the MoE, whole",
}


def measured(row: str, folder: Path, device: str, limit_gb: float) -> dict[str, float]:
    """In a process of its own: a row's time."""
    if device == "cpu":  # CUDA maps more than there is
        mapped = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        limit = int(limit_gb * 1e9) + 2 * mapped  # a file may be mapped by who checks it as well
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    else:
        torch.zeros(1, device=device)  # what CUDA's start takes is no row's time
    os.environ["TMPDIR"] = str(folder)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with kept_memory():
        began = time.perf_counter()
        ROWS[row](folder, device)
        return {"seconds": time.perf_counter() - began}


def plans(shape: Shape, tokens: int, device: str) -> dict[str, int]:
    """What ``flows.plan`` says of each row."""
    where: dict[str, Any] = {"device": device}
    config, scored = StatisticsConfig(shards=1, **STATISTICS), EvaluationConfig(**STATISTICS)
    many = {"experts": len(EXPERTS), **where}
    return {
        "averaging": memory.averaging_bytes(shape),
        "statistics, whole": memory.statistics_bytes(shape, config, **where),
        "statistics, streamed": memory.streamed_statistics_bytes(shape, config, **where),
        "scoring, whole": memory.evaluation_bytes(shape, scored, **where),
        "scoring, streamed": memory.streamed_evaluation_bytes(shape, scored, **where),
        "scoring the MoE, whole": memory.evaluation_bytes(shape, scored, **many),
        "scoring the MoE, streamed": memory.streamed_evaluation_bytes(shape, scored, **many),
        "repair": memory.repair_bytes(shape, config, tokens, head=False, **where),
    }


if __name__ == "__main__":
    main()
