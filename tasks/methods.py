"""Every method there is, what runs on a finished model, and the stages and models of a recipe."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from infra.recipe.schema import Recipe
from tasks.ders.checks import ders_faults
from tasks.dume import method as dume
from tasks.dume.checks import routing_faults
from tasks.engine.method import Addition, Method, Models
from tasks.simoe import method as simoe
from tasks.symphony import method as symphony

if TYPE_CHECKING:
    from tasks.engine.stage import Stage

METHODS: Mapping[str, Method] = {
    method.name: method for method in (dume.METHOD, symphony.METHOD, simoe.METHOD)
}
"""How a model is made; the first where a recipe says nothing else. A method is a line here, a
folder beside this file, and one in the library: see docs/adding-a-method.md."""


def models_of(recipe: Recipe) -> Models:
    """Rows that can be scored on tasks: the method's own, and the baselines that are trained."""
    trained = {n: (f"baselines/{n}",) for n, row in recipe.baselines.items() if row.trains}
    return {**METHODS[recipe.method].models(recipe), **trained}


def scored_models(recipe: Recipe) -> Models:
    """Rows that are scored on tasks."""
    chosen = recipe.task_evaluation.models
    models = models_of(recipe)
    return {row: models[row] for row in models if chosen is None or row in chosen}


def own_models(recipe: Recipe) -> list[str]:
    """Rows of ``scored_models`` that are there without the comparison that some methods add."""
    beside = recipe.baselines if METHODS[recipe.method].compares else {}
    return [row for row in scored_models(recipe) if row not in beside]


def _comparison_stages() -> "tuple[Stage, ...]":
    from tasks.baselines.baselines import baselines
    from tasks.baselines.comparison import comparison

    return baselines, comparison


def _compression_stages() -> "tuple[Stage, ...]":
    from tasks.ders.compression import compression
    from tasks.ders.sweeps import sweeps

    return sweeps, compression


@cache
def _task_stages() -> "tuple[Stage, ...]":
    from tasks.data.task_sets import task_sets
    from tasks.dume.task_routing import task_routing
    from tasks.scoring.task_scores import task_scores_of

    return task_sets, task_scores_of(scored_models), task_routing


COMPARISON = Addition(
    name="comparison",
    stages=_comparison_stages,
    asked=lambda recipe: METHODS[recipe.method].compares and bool(recipe.baselines),
)
COMPRESSION = Addition(
    name="DeRS",
    stages=_compression_stages,
    asked=lambda recipe: recipe.compression is not None,
    checks=ders_faults,
)
TASKS = Addition(
    name="tasks",
    stages=_task_stages,
    asked=lambda recipe: bool(recipe.tasks),
    checks=routing_faults,
)
ADDITIONS = (COMPARISON, COMPRESSION, TASKS)
"""What runs on a model that is finished, in this order."""


def stages_of(recipe: Recipe) -> "tuple[Stage, ...]":
    """Every stage of a recipe, in the order in which data flows.

    Tasks are made beside the documents: what is missing of them is said before anything is trained.
    """
    asked = (addition for addition in ADDITIONS if addition.asked(recipe))
    stages = [*METHODS[recipe.method].stages(), *(s for own in asked for s in own.stages())]
    if TASKS.asked(recipe):
        task_sets = TASKS.stages()[0]
        stages.remove(task_sets)
        texts = [n for n, stage in enumerate(stages, 1) if stage.name in ("sources", "documents")]
        stages.insert(max(texts, default=0), task_sets)
    return tuple(stages)


def every_stage() -> "tuple[Stage, ...]":
    """Every stage that there is, once."""
    parts: tuple[Method | Addition, ...] = (*METHODS.values(), *ADDITIONS)
    return tuple({id(stage): stage for part in parts for stage in part.stages()}.values())
