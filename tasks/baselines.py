"""Stage ``baselines``: one published way of upcycling, built and trained, a row of a comparison."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from infra.compute import Piece
from infra.recipe import Recipe
from tasks.architectures import OWN_MODELS
from tasks.routers import ROUTERS
from tasks.seed import TRAINING_SOURCES
from tasks.stage import StageRun, each, stage
from tasks.workspace import take
from upcycle_core.baselines.config import Baseline
from upcycle_core.baselines.start import write_start
from upcycle_core.corpora.batches import PackedSequences, packed_sequences
from upcycle_core.corpora.shards import TokenCorpus
from upcycle_core.dume.router import load_routers
from upcycle_core.moe.size import parameter_counts
from upcycle_core.progress import Progress
from upcycle_core.training.config import MoEObjective, TrainingConfig
from upcycle_core.training.pictures import write_load
from upcycle_core.training.trainer import TrainingResult, train

START_SOURCES = (
    *OWN_MODELS,
    "upcycle_core/backbone/average.py",
    "upcycle_core/baselines/bam/write.py",
    "upcycle_core/baselines/btx.py",
    "upcycle_core/baselines/mixture.py",
    "upcycle_core/baselines/start.py",
    "upcycle_core/baselines/upcycling.py",
    "upcycle_core/ders/upcycle.py",
    "upcycle_core/moe/assemble.py",
    "upcycle_core/moe/plan.py",
    "upcycle_core/moe/random.py",
)
"""What decides the checkpoint that a baseline's training begins with."""
TRAINING = "training"
"""Folder beside the weights: what the training came to, and how its experts were used."""
SUMMARY = f"{TRAINING}/summary.json"
VALIDATION_ROWS = 64
"""Sequences of calibration text that ``evaluation_steps`` measures the loss on."""


def _inputs(recipe: Recipe, name: str) -> list[str]:
    baseline = recipe.baselines[name]
    found = list(each(recipe, "corpora/{domain}/train"))
    if baseline.training.evaluation_steps is not None:
        found += each(recipe, "corpora/{domain}/calibration")
    if baseline.uses_experts:
        found += each(recipe, "experts/{domain}")
    if baseline.uses_seed:
        found.append("seed")
    if baseline.method == "dume":
        found += ["backbone", "router"]
    return found


@stage(
    "baselines/{baseline}",
    inputs=_inputs,
    params=("seed", "baselines.{baseline}", "moe.max_shard_bytes", "compute.baselines"),
    sources=(
        *TRAINING_SOURCES,
        *START_SOURCES,
        "tasks/baselines.py",
        "upcycle_core/evaluation/canvas.py",
        "upcycle_core/moe/size.py",
        "upcycle_core/training/pictures.py",
    ),
    needed=lambda recipe: recipe.method == "dume",
)
def baselines(run: StageRun) -> None:
    """Write the trained checkpoint, and beside it what its training came to."""
    recipe, baseline = run.recipe, run.recipe.baselines[run.item]
    domains = list(recipe.domains)
    start = Piece(
        name="start",
        function=start_piece,
        arguments={
            "baseline": baseline,
            "experts": {d: run.path(f"experts/{d}") for d in domains},
            "seed_model": run.path("seed"),
            "backbone": run.path("backbone"),
            "routers": run.path("router") / ROUTERS["calibration"],
            "copies": baseline.experts(len(domains)),
            "seed": recipe.seed,
            "max_shard_bytes": recipe.moe.max_shard_bytes,
        },
    )
    started = run.run([start], "baselines")["start"]
    train_from(
        run,
        started.path,
        training=baseline.training,
        # A dense model has neither routers nor experts.
        objective=baseline.objective if baseline.experts(len(domains)) else None,
        kind="baselines",
    )


def train_from(
    run: StageRun,
    start: Path,
    *,
    training: TrainingConfig,
    objective: MoEObjective | None,
    kind: Literal["baselines", "post_training"],
) -> None:
    """Train ``start`` on all domains into ``run.out``; write what the training came to beside it.

    Args:
        run: The stage.
        start: The checkpoint.
        training: Steps, batches, optimizer.
        objective: What is trained of a MoE; None for a dense model.
        kind: Of the resources.
    """
    weights = {} if objective is None else objective.domain_weights
    piece = Piece(
        name="trained",
        function=train_piece,
        workers=getattr(run.recipe.compute, kind).workers,
        arguments={
            "start": start,
            "corpora": {d: run.path(f"corpora/{d}") for d in run.recipe.domains},
            "config": training,
            "objective": objective,
            "weights": [weights.get(d, 1.0) for d in run.recipe.domains],
            "seed": run.recipe.seed,
            "device": run.device(kind),
        },
    )
    done = run.run([piece], kind)["trained"]
    take(done.path, run.out)
    write_training(run, done.result, training, is_moe=objective is not None)


def write_training(
    run: StageRun, result: Mapping[str, Any], training: TrainingConfig, *, is_moe: bool
) -> None:
    """What the training came to; nothing that depends on the machine's speed.

    Args:
        run: The stage; its ``out`` holds the checkpoint.
        result: As ``training_result``; ``rows``, where there is one, is written too.
        training: For its tokens.
        is_moe: Whether experts have loads.
    """
    folder = run.out / TRAINING
    folder.mkdir()
    counts = parameter_counts(run.out)
    summary = {
        "loss": result["loss"],
        "validation_loss": result["validation_loss"],
        "tokens": training.tokens,
        "trained_parameters": result["trained_parameters"],
        "active_parameters": counts.active,
        "total_parameters": counts.total,
        **result.get("rows", {}),
    }
    (run.out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    if is_moe:
        write_load(result["curves"], folder)
    if run.recorder is not None:
        run.recorder.log_artifacts(folder, TRAINING)


def start_piece(
    *,
    out: Path,
    progress: Progress,
    baseline: Baseline,
    experts: Mapping[str, Path],
    seed_model: Path,
    backbone: Path,
    routers: Path,
    copies: int,
    seed: int,
    max_shard_bytes: int,
) -> None:
    """The piece: the checkpoint that training starts from."""
    write_start(
        baseline,
        out,
        experts=experts,
        seed_model=seed_model,
        backbone=backbone,
        routers=load_routers(routers).weights if baseline.method == "dume" else {},
        copies=copies,
        seed=seed,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def train_piece(
    *,
    out: Path,
    progress: Progress,
    start: Path,
    corpora: Mapping[str, Path],
    config: TrainingConfig,
    objective: MoEObjective | None,
    weights: list[float],
    seed: int,
    device: str,
) -> dict[str, Any]:
    """The piece, in each of its workers: train on the mixture of all domains."""

    def rows(split: str, count: int) -> PackedSequences:
        return packed_sequences(
            [TokenCorpus(path / split) for path in corpora.values()],
            sequence_length=config.sequence_length,
            count=count,
            seed=seed,
            weights=weights,
        )

    validation = None
    if config.evaluation_steps is not None:
        validation = rows("calibration", VALIDATION_ROWS)
    result = train(
        start,
        rows("train", config.tokens // config.sequence_length),
        out,
        config=config,
        seed=seed,
        checkpoints=out.with_suffix(".checkpoints"),
        progress=progress,
        device=device,
        objective=objective,
        validation=validation,
    )
    return training_result(result)


def training_result(result: TrainingResult) -> dict[str, Any]:
    """What a piece that trains hands back, for the log and for ``write_training``."""
    return {
        "loss": result.final_loss,
        "validation_loss": result.validation_loss,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "trained_parameters": result.trained_parameters,
        "curves": result.curves,
    }
