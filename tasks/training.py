"""The one piece that trains, whatever is trained on what, and what a training came to."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from infra.cluster.pieces import Piece
from infra.recipe.resources import WorkerResources
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import SUMMARY, TRAINING
from tasks.engine.stage_run import StageRun
from tasks.engine.workspace import take
from upcycle_core.corpora.batches import PackedSequences, packed_sequences
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.instructions import InstructionRows
from upcycle_core.corpora.plain_chat import name_plain_form
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.moe.size import parameter_counts
from upcycle_core.progress import Progress
from upcycle_core.training import workers
from upcycle_core.training.config import (
    ExpertTrainingConfig,
    MoEObjective,
    Sharding,
    TrainingConfig,
)
from upcycle_core.training.pictures import write_load

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
    domain_weights: Mapping[str, float] | None = None,
    data: "Texts | Instructions | None" = None,
    function: Callable[..., Any] | None = None,
) -> None:
    """Train ``start`` into ``run.out``; write what the training came to beside it.

    Args:
        run: The stage.
        start: The checkpoint.
        training: Steps, batches, optimizer.
        objective: What is trained of a MoE; None for a dense model.
        kind: Of the resources.
        domain_weights: How often each domain's text is drawn; those of ``objective`` by default.
        data: What it is trained on; the texts of all domains by default.
        function: In place of ``train_piece``.
    """
    if data is None:
        own = {} if objective is None else objective.domain_weights
        weights = own if domain_weights is None else domain_weights
        validated = training.evaluation_steps is not None
        data = Texts(
            train=_texts(run, "train"),
            weights=[weights.get(d, 1.0) for d in run.recipe.domains],
            validation=_texts(run, "calibration") if validated else (),
        )
    piece = training_piece(
        run, "trained", start, data, training, kind=kind, objective=objective, function=function
    )
    done = run.run([piece], kind)["trained"]
    take(done.path, run.out)
    write_training(run, done.result, is_moe=objective is not None)


def training_piece(
    run: StageRun,
    name: str,
    start: Path,
    data: "Texts | Instructions",
    training: TrainingConfig,
    *,
    kind: str,
    objective: MoEObjective | None = None,
    function: Callable[..., Any] | None = None,
) -> Piece:
    """The piece ``name`` that trains ``start``; see ``train_from``."""
    arguments = {
        "start": start,
        "data": data,
        "config": training,
        "objective": objective,
        "seed": run.recipe.seed,
        "device": run.device(kind),
    }
    return piece_of(run, name, function or train_piece, kind, **arguments)


def train_one(run: StageRun, function: Callable[..., Any], kind: str, /, **arguments: Any) -> Any:
    """Run the one piece of a training, which fills ``run.out``; returns its result."""
    done = run.run([piece_of(run, "whole", function, kind, **arguments)], kind)["whole"]
    take(done.path, run.out)
    return done.result


def piece_of(
    run: StageRun, name: str, function: Callable[..., Any], kind: str, /, **arguments: Any
) -> Piece:
    """A piece that trains, in as many workers as ``compute.KIND`` says."""
    resources: WorkerResources = getattr(run.recipe.compute, kind)
    if resources.sharding != "none":  # else the piece is what it was before there was a choice
        arguments["divided"] = resources.sharding
    return Piece(
        name=name,
        function=function,
        workers=resources.workers,
        placement=resources.placement or "pack",
        arguments=arguments,
    )


def _texts(run: StageRun, split: str) -> list[Path]:
    return [run.path(f"corpora/{domain}/{split}") for domain in run.recipe.domains]


def write_training(run: StageRun, result: Mapping[str, Any], *, is_moe: bool) -> None:
    """What the training came to; nothing that depends on the machine's speed.

    Args:
        run: The stage; its ``out`` holds the checkpoint.
        result: As of ``train_piece``; ``rows``, where there are any, is written too.
        is_moe: Whether experts have loads.
    """
    folder = run.out / TRAINING
    folder.mkdir()
    counts = parameter_counts(run.out)
    summary = {
        "loss": result["loss"],
        "validation_loss": result["validation_loss"],
        "tokens": result["tokens"],
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


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of tokenised texts, packed.

    Args:
        train: A corpus split each.
        weights: Their shares; equal by default.
        validation: The splits that ``evaluation_steps`` measures the loss on.
    """

    train: Sequence[Path]
    weights: Sequence[float] | None = None
    validation: Sequence[Path] = ()

    def rows(self, tokenizer: Path, *, config: TrainingConfig, seed: int) -> PackedSequences:
        """All that a training of ``config`` reads, in seeded order."""
        return self._packed(self.train, config, config.tokens // config.sequence_length, seed)

    def validation_rows(self, config: TrainingConfig, seed: int) -> PackedSequences | None:
        """What ``evaluation_steps`` measures the loss on, where it is set."""
        if config.evaluation_steps is None:
            return None
        return self._packed(self.validation, config, VALIDATION_ROWS, seed)

    def _packed(
        self, paths: Sequence[Path], config: TrainingConfig, count: int, seed: int
    ) -> PackedSequences:
        return packed_sequences(
            [TokenCorpus(path) for path in paths],
            sequence_length=config.sequence_length,
            count=count,
            seed=seed,
            weights=self.weights,
            loss=config.loss,
        )


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Rows of instructions, with loss on the responses alone.

    Args:
        files: JSON lines of records.
        tasks: Tasks whose index goes with each row, where a model routes by it.
        cuts: Whether what is too long loses its beginning; else it is left out.
        bos: Whether a beginning-of-sequence token stands before each.
    """

    files: Sequence[Path]
    tasks: tuple[str, ...] = ()
    cuts: bool = True
    bos: Bos = "auto"

    def rows(self, tokenizer: Path, *, config: TrainingConfig, seed: int) -> InstructionRows:
        """All that a training of ``config`` reads."""
        return InstructionRows(
            list(self.files),
            tokenizer,
            sequence_length=config.sequence_length,
            count=config.tokens // config.sequence_length,
            seed=seed,
            tasks=self.tasks,
            cuts=self.cuts,
            bos=self.bos,
        )

    def name_form(self, model: Path) -> None:
        """Put beside a model that was tuned on them how it wants to be asked."""
        if workers.rank() == 0:
            name_plain_form(model, self.bos)


def train_piece(
    *,
    out: Path,
    progress: Progress,
    start: Path,
    data: Texts | Instructions,
    config: TrainingConfig,
    seed: int,
    device: str,
    objective: MoEObjective | None = None,
    divided: Sharding = "none",
) -> dict[str, Any]:
    """The piece of every training, in each of its workers.

    Checkpoints lie beside ``out``; a piece that was killed continues from the last whole one.
    """
    # Seconds, with the HF Trainer; the flow that sends pieces does without.
    from upcycle_core.training.expert import train_expert
    from upcycle_core.training.trainer import train

    rows = data.rows(start, config=config, seed=seed)
    common: dict[str, Any] = {
        "config": config,
        "seed": seed,
        "checkpoints": out.with_suffix(".checkpoints"),
        "progress": progress,
        "device": device,
        "divided": divided,
    }
    if isinstance(config, ExpertTrainingConfig):
        result = train_expert(start, rows, out, **common)
    else:
        validation = data.validation_rows(config, seed) if isinstance(data, Texts) else None
        result = train(start, rows, out, objective=objective, validation=validation, **common)
    if isinstance(data, Instructions):
        data.name_form(out)
    summary = {
        "loss": result.final_loss,
        "tokens": result.tokens,
        "validation_loss": result.validation_loss,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "trained_parameters": result.trained_parameters,
        "curves": result.curves,
    }
    return summary | ({"rows": row_counts(rows)} if isinstance(rows, InstructionRows) else {})


def row_counts(rows: InstructionRows) -> dict[str, int]:
    """How many records there were, were cut, and were left out."""
    return {"records": rows.records, "cut": rows.cut, "left_out": rows.left_out}
