"""Files of tasks outside the workspace: whether they are there, and their fingerprint."""

from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.engine.sources import CODE
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.errors import Fault
from upcycle_core.evaluation.tasks.definitions import runs_programs, task_faults, task_files
from upcycle_core.evaluation.tasks.sandbox import sandbox_faults


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
