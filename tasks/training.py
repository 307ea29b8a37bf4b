"""Training a checkpoint on all domains, and what it came to: for baselines and joined models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from infra.cluster.compute import Piece
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import SUMMARY, TRAINING
from tasks.engine.stage_run import StageRun
from tasks.engine.workspace import take
from upcycle_core.corpora.batches import PackedSequences, packed_sequences
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.moe.size import parameter_counts
from upcycle_core.progress import Progress
from upcycle_core.training.config import MoEObjective, TrainingConfig
from upcycle_core.training.pictures import write_load
from upcycle_core.training.trainer import TrainingResult, train

VALIDATION_ROWS = 64
"""Sequences of calibration text that ``evaluation_steps`` measures the loss on."""


def trained_rows(recipe: Recipe) -> list[str]:
    """Rows of a comparison that are trained."""
    return [name for name, row in recipe.baselines.items() if row.trains]


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
    splits = ["train"] if training.evaluation_steps is None else ["train", "calibration"]
    piece = Piece(
        name="trained",
        function=train_piece,
        workers=getattr(run.recipe.compute, kind).workers,
        arguments={
            "start": start,
            "texts": {split: _texts(run, split) for split in splits},
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


def _texts(run: StageRun, split: str) -> list[Path]:
    return [run.path(f"corpora/{domain}/{split}") for domain in run.recipe.domains]


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


def train_piece(
    *,
    out: Path,
    progress: Progress,
    start: Path,
    texts: Mapping[str, Sequence[Path]],
    config: TrainingConfig,
    objective: MoEObjective | None,
    weights: list[float],
    seed: int,
    device: str,
) -> dict[str, Any]:
    """The piece, in each of its workers: train on the mixture of all domains."""

    def rows(split: str, count: int) -> PackedSequences:
        return packed_sequences(
            [TokenCorpus(path) for path in texts[split]],
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
