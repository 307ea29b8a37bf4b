"""Stage ``task_sets``: every task of the recipe made whole on disk, its data beside it."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.data.given import given_model, given_models
from tasks.engine.sources import CODE
from tasks.engine.stage import StageRun, stage
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.reader import read_documents
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.tasks.config import CodeConfig, EvaluationTask
from upcycle_core.evaluation.tasks.definitions import (
    runs_programs,
    task_faults,
    task_files,
    write_task,
)
from upcycle_core.evaluation.tasks.sandbox import sandbox_faults
from upcycle_core.progress import Progress


def _inputs(recipe: Recipe, item: str) -> Iterable[str]:
    yield from (f"documents/{domain}" for domain in _read(recipe))
    yield from (f"sources/tasks/{name}.json" for name in recipe.tasks)


def _read(recipe: Recipe) -> list[str]:
    """The domains whose held-out text becomes a task."""
    read = {task.domain for task in recipe.tasks.values() if task.heldout is not None}
    return [domain for domain in recipe.domains if domain in read]


@stage(
    "task_sets", _inputs, params=("seed", "tasks", "task_evaluation.folder", "task_evaluation.code")
)
def task_sets(run: StageRun) -> None:
    """Write ``TASK/``: definition, data and settings."""
    run.run_one(
        write_task_sets,
        "evaluation",
        tasks=run.recipe.tasks,
        documents={d: run.path(f"documents/{d}/heldout.parquet") for d in _read(run.recipe)},
        folder=task_folder(run.recipe),
        seed=run.recipe.seed,
        code=run.recipe.task_evaluation.code,
        positions=task_positions(run.recipe, run.models),
    )


def task_positions(recipe: Recipe, cache: Path) -> int | None:
    """The fewest of any model that is scored, as far as they are known before there is one."""
    if recipe.trains_seed:
        return recipe.seed_model.shape.max_positions
    known = []
    for model in given_models(recipe).values():
        with suppress(InputError):  # of what is not needed any more, and is not there
            reader = CheckpointReader(given_model(recipe, model, cache))
            known.append(reader.config.get("max_position_embeddings"))
    return min((length for length in known if isinstance(length, int)), default=None)


def write_task_sets(
    *,
    out: Path,
    progress: Progress,
    tasks: Mapping[str, EvaluationTask],
    documents: Mapping[str, Path],
    folder: Path | None,
    seed: int,
    code: CodeConfig,
    positions: int | None = None,
) -> None:
    """The piece: all tasks. Each is loaded once, so that missing data are found here, and answers
    that leave no room for a prompt in ``positions``."""
    from upcycle_core.evaluation.tasks.tasks import check_tasks  # imports the harness: seconds

    progress.start("making tasks", len(tasks), "tasks")
    for name, task in tasks.items():
        own = documents.get(task.domain or "")
        texts = tuple if own is None else partial(read_documents, own)
        write_task(task, out / name, folder=folder, root=CODE, seed=seed, texts=texts)
        progress.advance(1)
    check_tasks({name: out / name for name in tasks}, code=code, positions=positions)


def task_folder(recipe: Recipe) -> Path | None:
    """What ``{folder}`` stands for in tasks."""
    folder = recipe.task_evaluation.folder or recipe.folder
    return None if folder is None else Path(folder)


def task_set_faults(recipe: Recipe) -> list[Fault]:
    """What keeps tasks from being run: missing files, programs that may not run."""
    folder = task_folder(recipe)
    found = []
    for name, task in recipe.tasks.items():
        where = f"tasks.{name}"
        faults = task_faults(task, where, folder=folder, root=CODE)
        if not faults and runs_programs(task, CODE):
            faults = _code_faults(where, allowed=recipe.task_evaluation.code.allow)
        found += faults
    return found


def _code_faults(where: str, *, allowed: bool) -> list[Fault]:
    if not allowed:
        remedy = (
            "runs programs that the model writes; allow it with "
            "task_evaluation.code.allow = true, or leave the task out"
        )
        return [Fault(where, "program", remedy)]
    return [Fault(where, fault.value, fault.remedy) for fault in sandbox_faults()]


def task_fingerprint(recipe: Recipe, name: str) -> dict[str, str]:
    """sha256 of every file that a task is made from, by its place in the recipe's words."""
    files = task_files(recipe.tasks[name], folder=task_folder(recipe), root=CODE)
    return {reference: sha256_file(path) for reference, path in files.items()}
