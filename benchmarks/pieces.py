"""The pieces whose memory ``benchmarks.planned`` measures, each as small as it can be."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import torch

from infra.settings import DEFAULTS
from upcycle_core.backbone.average import write_average
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.batches import PackedSequences, packed_sequences
from upcycle_core.corpora.instructions import InstructionRows
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.repair import repair_expert
from upcycle_core.dume.statistics import domain_statistics
from upcycle_core.evaluation.instructions.answers import answer
from upcycle_core.evaluation.similarity.config import SimilarityConfig
from upcycle_core.evaluation.similarity.measure import moe_similarity
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import evaluate_checkpoint
from upcycle_core.planning import alignment, memory
from upcycle_core.planning.answering import FP32, answering_bytes
from upcycle_core.planning.compression import compressing_bytes
from upcycle_core.planning.rehearsal import training_bytes
from upcycle_core.planning.shape import Shape
from upcycle_core.planning.trained import (
    gate_parameters,
    gated_parameters,
    mixture_training_bytes,
    simoe_training_bytes,
)
from upcycle_core.progress import Silent
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.train import train_simoe
from upcycle_core.simoe.upcycle import upcycle_in_memory
from upcycle_core.symphony.config import CalibrationConfig
from upcycle_core.symphony.moments import collect_moments
from upcycle_core.training.config import ExpertTrainingConfig, MoEObjective, TrainingConfig
from upcycle_core.training.expert import train_expert
from upcycle_core.training.trainer import train as train_whole

EXPERTS = ("one", "other")
LENGTH, BATCH, TOKENS, STEPS = 512, 2, 8_192, 2
ANSWERS = "answers of a SIMoE"
ANSWERED, ANSWER = 8, 32
"""Prompts at once, and tokens of an answer."""
SHARD = 10**10
CHECKPOINTS = "checkpoints"
"""Folder of the trainings'; it may lie on another disk."""
NARROW = "moments in bf16"
METHODS = ("full", "ffn", "lora", f"full, {NARROW}", f"ffn, {NARROW}")
"""Of an expert's training."""
GROUP = 2
"""Layers that a comparison of models counts at a time."""
OBJECTIVE = MoEObjective(trainable=("experts", "backbone"))
"""A router of top-1 learns nothing from text."""
SIMOE = SimoeUpcyclingConfig(experts=4, tau=0.0)
"""Nothing has to close within two steps."""
CODECS = {
    "sparse": CodecConfig(codec="sparse", drop_rate=0.9),
    "quantised": CodecConfig(codec="quantised", bits=4),
    "low rank": CodecConfig(codec="low_rank", rank=16),
}


def settings(precision: Any) -> tuple[StatisticsConfig, EvaluationConfig]:
    """Of the passes."""
    common = {"sequence_length": LENGTH, "batch_size": BATCH, "precision": precision}
    return (
        StatisticsConfig(tokens=TOKENS, shards=1, **common),
        EvaluationConfig(tokens=TOKENS, **common),
    )


def training(method: str, precision: Any) -> ExpertTrainingConfig:
    """Of an expert, too short to learn; a method may be followed by ``, NARROW``."""
    trained: Any = method.removesuffix(f", {NARROW}")
    return ExpertTrainingConfig(
        method=trained,
        optimizer_state="bf16" if method.endswith(NARROW) else "fp32",
        steps=STEPS,
        batch_size=BATCH,
        sequence_length=LENGTH,
        warmup_steps=1,
        checkpoint_steps=STEPS,
        precision=precision,
    )


def whole(precision: Any) -> TrainingConfig:
    """Of a finished model, too short to learn."""
    own = training("full", precision)
    return TrainingConfig(**{name: getattr(own, name) for name in vars(TrainingConfig())})


def comparing(precision: Any) -> CalibrationConfig:
    """Of two models."""
    return CalibrationConfig(
        tokens=TOKENS,
        sequence_length=LENGTH,
        batch_size=BATCH,
        precision=precision,
        layers=GROUP,
    )


def likeness(precision: Any) -> SimilarityConfig:
    """Of experts; neurons of all layers would not fit here."""
    return SimilarityConfig(
        tokens=TOKENS,
        sequence_length=LENGTH,
        batch_size=BATCH,
        precision=precision,
        representations=("outputs",),
    )


def write_texts(folder: Path, words: int) -> None:
    """The same text as documents and as instructions, for models that read with a tokenizer."""
    draw = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in draw.integers(1, words, LENGTH)) for _ in range(64)]
    parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet")
    half = LENGTH // 2
    rows = (
        {"prompt": " ".join(t.split()[:half]), "response": " ".join(t.split()[half:-8])}
        for t in texts
    )
    (folder / "asks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _packed(folder: Path) -> PackedSequences:
    """What a training reads."""
    text = [TokenCorpus(folder / "text")]
    return packed_sequences(text, sequence_length=LENGTH, count=STEPS * BATCH, seed=0)


def train(folder: Path, precision: str, device: str, *, method: str) -> None:
    """An expert."""
    config = training(method, precision)
    rows = _packed(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        out = Path(name)
        common: dict[str, Any] = {"progress": Silent(), "seed": 0, "device": device}
        train_expert(
            *(folder / "one", rows, out / "out"),
            config=config,
            checkpoints=folder / CHECKPOINTS / str(os.getpid()),
            **common,
        )


def statistics(folder: Path, precision: str, device: str) -> None:
    """One domain's, as one shard."""
    config, _ = settings(precision)
    parts = (folder / "backbone", folder / "one", folder / "text")
    out = folder / "statistics.safetensors"
    domain_statistics(*parts, out, config=config, shard=0, device=device)


def repair(folder: Path, precision: str, device: str) -> None:
    """One expert's, with the head's target."""
    config, _ = settings(precision)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        repair_expert(
            *(folder / "backbone", folder / "one", folder / "text", Path(out)),
            repair="down+head_target",
            config=config,
            max_shard_bytes=SHARD,
            device=device,
        )


def evaluation(folder: Path, precision: str, device: str, *, model: str) -> None:
    """A model's perplexity."""
    _, config = settings(precision)
    evaluate_checkpoint(
        folder / model,
        {"text": folder / "text"},
        config=config,
        device=device,
        progress=Silent(),
    )


def averaging(folder: Path, precision: str, device: str) -> None:
    """Of both experts, whole."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        readers = [CheckpointReader(folder / name) for name in EXPERTS]
        write_average(readers, Path(out), max_shard_bytes=SHARD)


def pairs(folder: Path, precision: str, device: str) -> None:
    """Two models over the same text, a group of layers."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        first, second = (folder / name for name in EXPERTS)
        collect_moments(
            first,
            second,
            {"text": folder / "text.parquet"},
            Path(out) / "sums.safetensors",
            config=comparing(precision),
            layers=range(GROUP),
            device=device,
        )


def similarity(folder: Path, precision: str, device: str) -> None:
    """The experts of the MoE, by what they put out."""
    config = likeness(precision)
    moe_similarity(folder / "moe", [folder / "text"], EXPERTS, config=config, device=device)


def storing(folder: Path, precision: str, device: str, *, codec: str) -> None:
    """The experts' deltas from their mean."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        compress(folder / "moe", Path(out) / "stored", config=CODECS[codec], minimum_cosine=-1)


def train_moe(folder: Path, precision: str, device: str) -> None:
    """All of the MoE."""
    config = whole(precision)
    rows = _packed(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        out = Path(name)
        common: dict[str, Any] = {"progress": Silent(), "seed": 0, "device": device}
        train_whole(
            *(folder / "moe", rows, out / "out"),
            config=config,
            objective=OBJECTIVE,
            checkpoints=folder / CHECKPOINTS / str(os.getpid()),
            **common,
        )


def train_sparse(folder: Path, precision: str, device: str) -> None:
    """A SIMoE, and what it writes at its end."""
    config = whole(precision)
    rows = InstructionRows(
        [folder / "asks.jsonl"],
        folder / "one",
        sequence_length=LENGTH,
        count=STEPS * BATCH,
        seed=0,
    )
    with tempfile.TemporaryDirectory(dir=folder) as name:
        out = Path(name)
        common: dict[str, Any] = {"progress": Silent(), "seed": 0, "device": device}
        train_simoe(
            *(folder / "one", rows, out / "out"),
            config=config,
            simoe=SIMOE,
            checkpoints=folder / CHECKPOINTS / str(os.getpid()),
            **common,
        )


def make_sparse(folder: Path) -> None:
    """A SIMoE that has learned nothing, all of whose experts are there."""
    model = upcycle_in_memory(folder / "one", SIMOE, seed=0)
    save_pruned(model, folder / "one", folder / "simoe")


def answers(folder: Path, precision: Any, device: str) -> None:
    """A SIMoE's, to prompts of half a row."""
    import upcycle_core.simoe.model  # noqa: F401  which makes its architecture known

    lines = (folder / "asks.jsonl").read_text().splitlines()[:ANSWERED]
    answer(
        folder / "simoe",
        [json.loads(line) for line in lines],
        max_new_tokens=ANSWER,
        batch_size=ANSWERED,
        precision=precision,
        device=device,
    )


PIECES: Mapping[str, Callable[[Path, str, str], None]] = {
    **{f"train {method}": partial(train, method=method) for method in METHODS},
    "statistics": statistics,
    "repair": repair,
    "evaluation": partial(evaluation, model="one"),
    "evaluation of the MoE": partial(evaluation, model="moe"),
    "averaging": averaging,
    "train MoE": train_moe,
    "train SIMoE": train_sparse,
    ANSWERS: answers,
    "comparison of models": pairs,
    "comparison of experts": similarity,
    **{f"DeRS, {name}": partial(storing, codec=name) for name in CODECS},
}
"""By name: what a piece does with the models in a folder, in a precision, on a device."""
ON_A_GPU = [kind for kind in PIECES if kind != "averaging" and not kind.startswith("DeRS")]
"""Those that use one."""
ALONE = {*(f"train {method}" for method in METHODS), "train SIMoE", ANSWERS, "evaluation"}
"""Those of one dense model."""


def keep_few_kernels() -> None:
    """Let children keep no more shapes' kernels than pieces of flows do."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, DEFAULTS[name])


def _answering(shape: Shape, precision: Any, device: str) -> int:
    grown = gated_parameters(shape, SIMOE) + gate_parameters(shape, SIMOE)
    return answering_bytes(
        replace(shape, itemsize=FP32, dtype=torch.float32),  # as its files have it
        (ANSWERED, LENGTH // 2 + ANSWER),
        precision,
        pruned=FP32 * (shape.whole + grown),
        device=device,
    )


def plan(kind: str, shape: Shape, precision: str, device: str) -> int:
    """The same, from the shape."""
    collected, scored = settings(precision)
    where: dict[str, Any] = {"device": device}
    if kind == "train MoE":
        counts: dict[str, Any] = {"experts": 2, "top_k": 1, "trainable": OBJECTIVE.trainable}
        return mixture_training_bytes(shape, whole(precision), **counts, **where)
    if kind == "train SIMoE":
        return simoe_training_bytes(shape, whole(precision), SIMOE, **where)
    if kind.startswith("train"):
        return training_bytes(shape, training(kind.removeprefix("train "), precision), **where)
    known: dict[str, Callable[[], int]] = {
        "statistics": lambda: memory.statistics_bytes(shape, collected, **where),
        "repair": lambda: memory.repair_bytes(shape, collected, TOKENS, head=True, **where),
        "evaluation": lambda: memory.evaluation_bytes(shape, scored, **where),
        "evaluation of the MoE": lambda: memory.evaluation_bytes(shape, scored, experts=2, **where),
        "averaging": lambda: memory.averaging_bytes(shape),
        ANSWERS: lambda: _answering(shape, precision, device),
        "comparison of models": lambda: alignment.pairs_bytes(shape, comparing(precision), **where),
        "comparison of experts": lambda: alignment.similarity_bytes(
            shape, likeness(precision), 2, experts=2, **where
        ),
        **{
            f"DeRS, {name}": partial(compressing_bytes, shape, codec, 2)
            for name, codec in CODECS.items()
        },
    }
    return known[kind]()
