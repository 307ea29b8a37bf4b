"""Peak memory as planned beside what is measured, of a piece of each kind.

    python -m benchmarks.planned [--size 1m|135m|1b|3b] [--kinds NAME ...] [--precision auto]

Models of that shape with random weights and text are made in a temporary folder. Each piece is a
process of its own; its memory is the peak of anonymous memory above that of the imports, which is
what ``upcycle_core.planning`` says from config.json alone.
"""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.children import call_in_child
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.models import save_word_tokenizer
from upcycle_core.backbone.average import write_average, write_backbone
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.batches import packed_sequences
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.repair import repair_expert
from upcycle_core.dume.statistics import domain_statistics
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import evaluate_checkpoint
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.planning import memory
from upcycle_core.planning.rehearsal import training_bytes
from upcycle_core.planning.shape import Shape
from upcycle_core.progress import Silent
from upcycle_core.training.config import ExpertTrainingConfig
from upcycle_core.training.expert import train_expert

SIZES: Mapping[str, Mapping[str, int]] = {
    "1m": {"hidden": 128, "inner": 384, "layers": 4, "heads": 4, "kv": 2, "vocabulary": 4096},
    "135m": {"hidden": 576, "inner": 1536, "layers": 30, "heads": 9, "kv": 3, "vocabulary": 49152},
    "1b": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv": 8, "vocabulary": 128256},
    "3b": {"hidden": 3072, "inner": 8192, "layers": 28, "heads": 24, "kv": 8, "vocabulary": 128256},
}
"""Shapes: the demo's, SmolLM2-135M's, Llama-3.2-1B's and -3B's."""
EXPERTS = ("one", "other")
LENGTH, BATCH, TOKENS, STEPS = 512, 2, 8_192, 2
SHARD = 10**10


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=[*SIZES], default="135m")
    parser.add_argument("--kinds", nargs="+", choices=[*PIECES], default=[*PIECES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    found, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="planned-") as name:
        folder = Path(name)
        make(folder, SIZES[options.size])
        for kind in options.kinds:
            call = partial(call_in_child, piece, kind, folder, options.precision)
            measured = call(threads=options.threads)["memory_mb"]
            planned = plan(kind, Shape.of(folder / "one"), options.precision) / 1e6
            found[kind] = {"planned_mb": planned, "memory_mb": measured}
            rows.append([kind, planned, measured, planned / measured])
    head = ["", "planned MB", "measured MB", "planned / measured"]
    print_table(f"{options.size}, peak memory above the imports", head, rows)
    ratios = {kind: own["planned_mb"] / own["memory_mb"] for kind, own in found.items()}
    print_result("planned", ratios, {"pieces": found, "size": options.size})


def make(folder: Path, size: Mapping[str, int]) -> None:
    """Two experts in bf16, what is made of them, and text; one model is held at a time."""
    config = LlamaConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        vocab_size=size["vocabulary"],
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )
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
    write_split(folder / "text", ((row, LENGTH) for row in rows), eos_id=0, vocabulary_size=words)


def settings(precision: Any) -> tuple[StatisticsConfig, EvaluationConfig]:
    """Of the passes."""
    common = {"sequence_length": LENGTH, "batch_size": BATCH, "precision": precision}
    return (
        StatisticsConfig(tokens=TOKENS, shards=1, **common),
        EvaluationConfig(tokens=TOKENS, **common),
    )


def training(method: Any, precision: Any) -> ExpertTrainingConfig:
    """Of an expert, too short to learn."""
    return ExpertTrainingConfig(
        method=method,
        steps=STEPS,
        batch_size=BATCH,
        sequence_length=LENGTH,
        warmup_steps=1,
        checkpoint_steps=STEPS,
        precision=precision,
    )


def train(folder: Path, precision: str, method: str) -> None:
    """An expert."""
    config = training(method, precision)
    rows = packed_sequences(
        [TokenCorpus(folder / "text")], sequence_length=LENGTH, count=STEPS * BATCH, seed=0
    )
    with tempfile.TemporaryDirectory(dir=folder) as name:
        out = Path(name)
        common: dict[str, Any] = {"progress": Silent(), "seed": 0, "device": "cpu"}
        train_expert(
            *(folder / "one", rows, out / "out"),
            config=config,
            checkpoints=out / "checkpoints",
            **common,
        )


def statistics(folder: Path, precision: str) -> None:
    """One domain's, as one shard."""
    config, _ = settings(precision)
    parts = (folder / "backbone", folder / "one", folder / "text")
    domain_statistics(*parts, folder / "statistics.safetensors", config=config, shard=0)


def repair(folder: Path, precision: str) -> None:
    """One expert's, with the head's target."""
    config, _ = settings(precision)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        repair_expert(
            *(folder / "backbone", folder / "one", folder / "text", Path(out)),
            repair="down+head_target",
            config=config,
            max_shard_bytes=SHARD,
        )


def evaluation(folder: Path, precision: str, model: str) -> None:
    """A model's perplexity."""
    _, config = settings(precision)
    evaluate_checkpoint(
        folder / model,
        {"text": folder / "text"},
        config=config,
        device="cpu",
        progress=Silent(),
    )


def averaging(folder: Path, precision: str) -> None:
    """Of both experts, whole."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        readers = [CheckpointReader(folder / name) for name in EXPERTS]
        write_average(readers, Path(out), max_shard_bytes=SHARD)


PIECES: Mapping[str, Callable[[Path, str], None]] = {
    "train full": partial(train, method="full"),
    "train ffn": partial(train, method="ffn"),
    "train lora": partial(train, method="lora"),
    "statistics": statistics,
    "repair": repair,
    "evaluation": partial(evaluation, model="one"),
    "evaluation of the MoE": partial(evaluation, model="moe"),
    "averaging": averaging,
}


def piece(kind: str, folder: Path, precision: str) -> dict[str, float]:
    """What the child does."""
    PIECES[kind](folder, precision)
    return {}


def plan(kind: str, shape: Shape, precision: str) -> int:
    """The same, from the shape."""
    collected, scored = settings(precision)
    if kind.startswith("train"):
        return training_bytes(shape, training(kind.split()[1], precision))
    return {
        "statistics": lambda: memory.statistics_bytes(shape, collected),
        "repair": lambda: memory.repair_bytes(shape, collected, TOKENS, head=True),
        "evaluation": lambda: memory.evaluation_bytes(shape, scored),
        "evaluation of the MoE": lambda: memory.evaluation_bytes(shape, scored, experts=2),
        "averaging": lambda: memory.averaging_bytes(shape),
    }[kind]()


if __name__ == "__main__":
    main()
