"""What scoring on tasks will need."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from infra.recipe.schema import Recipe
from tasks.methods import scored_models
from tasks.planning.joined import OWN_KINDS
from tasks.planning.parts import Subjects, joined
from tasks.planning.row import Planned
from upcycle_core.planning import memory


def task_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """Every model on all tasks, held whole: the batches are made to fit beside it.

    How long it takes is not known: that is the tasks' to say. A method whose model is no mixture
    says what it needs.
    """
    resources, models = recipe.compute.of("task_evaluation"), scored_models(recipe)
    averages = any(len(checkpoints) > 1 for checkpoints in models.values())
    config, shape = recipe.task_evaluation, joined(recipe, subjects.shape)
    rows = [row for row in recipe.baselines.values() if row.trains]
    mixed = [row.experts(subjects.domains) for row in rows if row.method not in OWN_KINDS]
    experts = max([subjects.domains, *mixed])
    needed = memory.weights_held(shape, config.precision, resources.device, experts=experts)
    of_each = partial(memory.divided_bytes, needed, shape, config.precision, resources.device)
    size = shape.itemsize * shape.mixture(experts)
    remedies = ["task_evaluation.precision = bf16"] if config.precision == "fp32" else []
    dense = averages * shape.itemsize * shape.whole
    for stage, pieces, passing in (("task_scores", len(models), dense), ("task_routing", 1, 0)):
        yield Planned(
            stage,
            pieces,
            pieces,
            passing=passing,
            read=pieces * size,
            flops=None,
            memory=of_each(resources.gpus),
            kind=recipe.compute.named("task_evaluation"),
            resources=resources,
            remedies=[*remedies, "fewer rows in task_evaluation.models"],
            lighter=partial(enough, of_each) if resources.gpus else None,
        )


def enough(of_each: Callable[[float], int], most: int, gpus: float) -> list[str]:
    """The setting with which GPUs hold a model among them, where the machine has so many.

    Args:
        of_each: Bytes of each of so many GPUs.
        most: What each of them may hold.
        gpus: How many the machine has.
    """
    counts = (count for count in range(2, int(gpus) + 1) if of_each(count) <= most)
    return [f"compute.task_evaluation.gpus = {count}" for count in islice(counts, 1)]
