"""What is wrong with what a recipe says about DUME, without reading any file."""

from collections.abc import Iterator
from dataclasses import replace

from infra.recipe.schema import Recipe
from tasks.engine.params import merge_keys, repair_keys, routed_repair_keys, value_at, weight_keys
from upcycle_core.dume.checks import fewest_tokens
from upcycle_core.dume.config import RouterConfig
from upcycle_core.errors import Fault
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.results import Parameter

DUME = "dume"

CROSS_VALIDATED = "cross-validate"
SWEEPS = ("sweep_top_k", "sweep_ridge_lambda", "sweep_window")
SCORED = {"rows": (DUME,), "cross_scores": (DUME, "symphony"), **dict.fromkeys(SWEEPS, (DUME,))}
"""{field of ``evaluation`` that says what a report scores: methods whose report it is}"""

FOLDS = 4
"""Parts of the statistics that a cross-validated lambda is given where the recipe names none."""


def with_folds(recipe: Recipe) -> Recipe:
    """The recipe with as many parts of its statistics as are needed: one, or those of the folds."""
    if recipe.statistics.folds is not None:
        return recipe
    folds = FOLDS if recipe.router.ridge_lambda == CROSS_VALIDATED else 1
    return replace(recipe, statistics=replace(recipe.statistics, folds=folds))


def fold_faults(recipe: Recipe) -> Iterator[Fault]:
    """Statistics that a lambda cannot be chosen on."""
    if recipe.router.ridge_lambda == CROSS_VALIDATED and recipe.statistics.parts < 2:
        remedy = "a cross-validated router.ridge_lambda needs 2 or more; leave it out for 4"
        yield Fault("statistics.folds", recipe.statistics.folds, remedy)


def router_faults(recipe: Recipe) -> Iterator[Fault]:
    """What the routers' rows, means of router inputs where they are no regression, do not use."""
    yield from fold_faults(recipe)
    if recipe.router.rows != "means":
        return
    usual = RouterConfig()
    for name in ("ridge_lambda", "domain_weights"):
        if (value := getattr(recipe.router, name)) != getattr(usual, name):
            remedy = "decides nothing of rows that are means (router.rows): remove it"
            yield Fault(f"router.{name}", value, remedy)
    for where in ("evaluation", "task_evaluation"):
        if values := getattr(recipe, where).sweep_ridge_lambda:
            remedy = "rows that are means (router.rows) are the same with every lambda: remove it"
            yield Fault(f"{where}.sweep_ridge_lambda", list(values), remedy)


def dume_faults(recipe: Recipe) -> Iterator[Fault]:
    """What the recipe, and the shape of a seed that is made here, say against what it asks for."""
    yield from router_faults(recipe)
    if recipe.trains_seed and not recipe.moe.normalise_top_k:
        from upcycle_core.architectures.families import FAMILIES  # torch

        yield from FAMILIES[recipe.seed_model.shape.family].normalising_faults()
    yield from _sequential_faults(recipe)
    yield from _repair_faults(recipe)


def _sequential_faults(recipe: Recipe) -> Iterator[Fault]:
    """Sweeps that would solve all layers' routers at once beside a model where they are not."""
    if recipe.router.solve != "sequential":
        return
    for where in ("evaluation", "task_evaluation"):
        for name in ("sweep_ridge_lambda", "sweep_window"):
            if values := getattr(getattr(recipe, where), name):
                remedy = "is solved for all layers at once, and router.solve is sequential: remove "
                yield Fault(f"{where}.{name}", list(values), f"{remedy}it, or solve jointly")


def _repair_faults(recipe: Recipe) -> Iterator[Fault]:
    """The same against a repair, and a head that needs one."""
    if recipe.backbone.merge.head == "fitted" and recipe.experts.repair != "down+head_target":
        remedy = "experts' last layers must map their states for it: set experts.repair to "
        yield Fault("backbone.merge.head", "fitted", f"{remedy}down+head_target, or take counts")
    if recipe.experts.repair == "none":
        if recipe.experts.repair_tokens != "own":
            remedy = "nothing is repaired: set experts.repair, or remove it"
            yield Fault("experts.repair_tokens", recipe.experts.repair_tokens, remedy)
        return
    if not recipe.trains_seed:
        return
    tokens = recipe.statistics.tokens
    needed = fewest_tokens({"intermediate_size": recipe.seed_model.shape.intermediate_size})
    if tokens is not None and tokens < needed:
        remedy = f"experts.repair needs at least {needed:,}: raise it, or repair none"
        yield Fault("statistics.tokens", tokens, remedy)


def unused_faults(recipe: Recipe) -> Iterator[Fault]:
    """What only DUME does, asked of another method."""
    asked = (*merge_keys(recipe), *repair_keys(recipe), *routed_repair_keys(recipe))
    usual, own = EvaluationConfig(), recipe.evaluation
    by: dict[str, tuple[str, ...]] = dict.fromkeys((*asked, *weight_keys(recipe)), ("dume",))
    by |= {f"evaluation.{n}": m for n, m in SCORED.items() if getattr(own, n) != getattr(usual, n)}
    for key, methods in by.items():
        if recipe.method not in methods:
            who = " and ".join(methods) if len(methods) > 1 else f"{methods[0]} alone"
            remedy = f"is done by {who}, and the method is {recipe.method}: remove it"
            value = value_at(recipe, key)
            yield Fault(key, list(value) if isinstance(value, tuple) else value, remedy)


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
