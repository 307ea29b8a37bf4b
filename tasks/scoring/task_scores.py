"""Stage ``task_scores``: one model on every task."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.cluster.pieces import Piece
from infra.durable import sync_tree
from infra.recipe.schema import Recipe
from tasks.engine.method import Models
from tasks.engine.stage import Stage, StageRun, stage
from tasks.scoring.answers import Answered, Answers
from tasks.scoring.architectures import register_architectures
from upcycle_core.backbone.average import write_average
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.corpora.config import Bos
from upcycle_core.evaluation.tasks.adapter import evaluate_tasks
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig
from upcycle_core.evaluation.tasks.items import Item, read_items, write_items
from upcycle_core.evaluation.tasks.score import TaskScore
from upcycle_core.progress import Progress

SCORES, ITEMS = "scores.json", "items.parquet"


def task_scores_of(models: Callable[[Recipe], Models]) -> Stage:
    """The stage, of the models that a recipe scores, each with the checkpoints it is made of."""

    def inputs(recipe: Recipe, row: str) -> list[str]:
        return [*models(recipe)[row], *(f"task_sets/{name}" for name in recipe.tasks)]

    @stage("task_scores/{model}", inputs, params=("task_evaluation", "corpus.bos"), each=models)
    def task_scores(run: StageRun) -> None:
        """Write ``scores.json`` and ``items.parquet``: every item's prompt, answer and score."""
        paths = [run.path(artifact) for artifact in models(run.recipe)[run.item]]
        task_sets = {name: run.path(f"task_sets/{name}") for name in run.recipe.tasks}
        piece = task_piece(run.recipe, paths, task_sets)

        def ask(some: Piece) -> Answered:
            return read_scores(run.run([replace(some, each=())], "task_evaluation")[some.name].path)

        answers = Answers(run.session.workspace, run.stage.label(run.item))
        scores, items = answers.of(piece, ask)
        _write(scores, items, run.out)

    return task_scores


def task_piece(recipe: Recipe, models: Sequence[Path], task_sets: Mapping[str, Path]) -> Piece:
    """The piece that asks one checkpoint, or the average of several, each task apart."""
    arguments = {
        "models": models,
        "task_sets": task_sets,
        "config": recipe.task_evaluation,
        "bos": recipe.corpus.bos,
        "device": recipe.compute.of("task_evaluation").device,
    }
    return Piece(name="tasks", function=score_model, arguments=arguments, each=("task_sets",))


def score_model(
    *,
    out: Path,
    progress: Progress,
    models: Sequence[Path],
    task_sets: Mapping[str, Path],
    config: TaskEvaluationConfig,
    bos: Bos,
    device: str,
) -> None:
    """The piece: one checkpoint, or the average of several; a kill costs the task at work."""
    register_architectures()
    out.mkdir()
    kept = out.with_name(f"{out.name}.tasks")
    kept.mkdir(exist_ok=True)

    def keep(task: str, score: TaskScore, items: Sequence[Item]) -> None:
        half = kept / f".{task}"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        _write({task: score}, items, half)
        sync_tree(half)
        half.rename(kept / task)

    left = {name: path for name, path in task_sets.items() if not (kept / name).exists()}
    if left:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            model = models[0] if len(models) == 1 else _average(models, Path(folder))
            how: Mapping[str, Any] = {"config": config, "bos": bos, "device": device}
            evaluate_tasks(model, left, progress=progress, finished=keep, **how)
    found = [read_scores(kept / name) for name in task_sets]
    scores = {task: score for own, _ in found for task, score in own.items()}
    _write(scores, [item for _, items in found for item in items], out)
    shutil.rmtree(kept)


def _write(scores: Mapping[str, TaskScore], items: Sequence[Item], out: Path) -> None:
    values = {task: score.to_dict() for task, score in scores.items()}
    (out / SCORES).write_text(json.dumps(values, indent=1) + "\n")
    write_items(items, out / ITEMS)


def read_scores(directory: Path) -> tuple[dict[str, TaskScore], list[Item]]:
    """What ``score_model`` wrote."""
    values = json.loads((directory / SCORES).read_text())
    scores = {task: TaskScore.from_dict(score) for task, score in values.items()}
    return scores, read_items(directory / ITEMS)


def _average(models: Sequence[Path], out: Path) -> Path:
    """The average of all weights, MLPs included, with the first one's tokenizer."""
    write_average([CheckpointReader(path) for path in models], out, max_shard_bytes=10**9)
    copy_tokenizer(models[0], out)
    return out
