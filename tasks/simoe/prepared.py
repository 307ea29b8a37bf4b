"""What prepared instructions lack for what a recipe asks of them, before a model is tuned."""

from collections.abc import Iterator
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.simoe.checks import FIGURES
from tasks.simoe.labels import label_faults, labels_of
from upcycle_core.errors import Fault


def prepared_faults(recipe: Recipe, instructions: Path) -> Iterator[Fault]:
    """Labels that are too few for BTX, and figures of the gate that no question is held out for.

    Args:
        recipe: Checked.
        instructions: What the stage of that name has made.
    """
    yield from label_faults(recipe, labels_of(instructions))
    for figure in recipe.registry.gate.metrics:
        split = figure.rpartition("_")[2]
        if figure in FIGURES and not (instructions / f"{split}.jsonl").stat().st_size:
            remedy = f"no question of a task that is {split} in training is held out: tasks of one "
            remedy += "instance leave none; name another figure, or give tasks more instances"
            yield Fault("registry.gate", figure, remedy)
