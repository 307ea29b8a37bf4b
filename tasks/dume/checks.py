"""What is wrong with what a recipe says about DUME, without reading any file."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.engine.params import merge_keys, repair_keys, value_at
from upcycle_core.dume.checks import fewest_tokens
from upcycle_core.errors import Fault
from upcycle_core.evaluation.text.results import Parameter

DUME = "dume"


def dume_faults(recipe: Recipe) -> Iterator[Fault]:
    """What the shape of a seed that is made here says against a repair."""
    if recipe.experts.repair == "none" or not recipe.trains_seed:
        return
    tokens = recipe.statistics.tokens
    needed = fewest_tokens({"intermediate_size": recipe.seed_model.shape.intermediate_size})
    if tokens is not None and tokens < needed:
        remedy = f"experts.repair needs at least {needed:,}: raise it, or repair none"
        yield Fault("statistics.tokens", tokens, remedy)


def unused_faults(recipe: Recipe) -> Iterator[Fault]:
    """What only DUME does, asked of another method."""
    for key in (*merge_keys(recipe), *repair_keys(recipe)):
        remedy = f"is done by dume alone, and the method is {recipe.method}: remove it"
        yield Fault(key, value_at(recipe, key), remedy)


def swept(recipe: Recipe) -> dict[Parameter, tuple[float, ...]]:
    """The values of each parameter that is swept on tasks."""
    config = recipe.task_evaluation
    return {
        "top_k": config.sweep_top_k,
        "ridge_lambda": config.sweep_ridge_lambda,
        "window": config.sweep_window,
    }


def routing_faults(recipe: Recipe) -> Iterator[Fault]:
    """What is asked for and cannot be scored."""
    where, rows = "task_evaluation.routing", recipe.task_evaluation.routing
    asked = {f"task_evaluation.sweep_{name}": values for name, values in swept(recipe).items()}
    if recipe.method != DUME:
        for field_, values in {where: rows, **asked}.items():
            if values:
                remedy = f"is about DUME's routers, and the method is {recipe.method}: remove it"
                yield Fault(field_, list(values), remedy)
        return
    if "oracle" in rows and not any(task.domain for task in recipe.tasks.values()):
        remedy = "no task has a domain, whose expert it would be; give one a `domain`"
        yield Fault(where, "oracle", remedy)
    if "dume_ood" in rows and all(d.elsewhere is None for d in recipe.domains.values()):
        yield Fault(
            where, "dume_ood", "no domain has text from `elsewhere`; give one, or remove it"
        )
