"""What prepared instructions lack for what a recipe asks of them, before a model is tuned."""

from collections.abc import Iterator
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.simoe.checks import FIGURES
from tasks.simoe.labels import label_faults, labels_of
from tasks.simoe.limit import held_to_limit
from upcycle_core.errors import Fault


def prepared_faults(recipe: Recipe, instructions: Path) -> Iterator[Fault]:
    """Labels that are too few for BTX; figures of the gate, and a limit, without any question.

    Args:
        recipe: Checked.
        instructions: What the stage of that name has made.
    """
    yield from label_faults(recipe, labels_of(instructions))
    least = recipe.tuning.least_exact_match
    if least is not None and held_to_limit(recipe) and _is_empty(instructions, "seen"):
        remedy = f"{_none('seen')}; leave it out, or give tasks more instances"
        yield Fault("tuning.least_exact_match", least, remedy)
    for figure in recipe.registry.gate.metrics:
        split = figure.rpartition("_")[2]
        if figure in FIGURES and _is_empty(instructions, split):
            remedy = f"{_none(split)}; name another figure, or give tasks more instances"
            yield Fault("registry.gate", figure, remedy)


def _is_empty(instructions: Path, split: str) -> bool:
    return not (instructions / f"{split}.jsonl").stat().st_size


def _none(split: str) -> str:
    return (
        f"no question of a task that is {split} in training is held out: tasks of one instance "
        "leave none"
    )
