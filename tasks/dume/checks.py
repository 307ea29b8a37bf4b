"""What is wrong with what a recipe says about DUME, without reading any file."""

from collections.abc import Iterator
from dataclasses import replace

from infra.recipe.schema import Recipe
from tasks.engine.params import merge_keys, repair_keys, routed_repair_keys, value_at, weight_keys
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.dume.checks import fewest_tokens
from upcycle_core.errors import Fault

CROSS_VALIDATED = "cross-validate"

FOLDS = 4
"""Parts of the statistics that a cross-validated lambda is given where the recipe names none."""


def with_folds(recipe: Recipe) -> Recipe:
    """The recipe with as many parts of its statistics as are needed: one, or those of the folds."""
    if recipe.statistics.folds is not None:
        return recipe
    folds = FOLDS if recipe.router.ridge_lambda == CROSS_VALIDATED else 1
    return replace(recipe, statistics=replace(recipe.statistics, folds=folds))


def dume_faults(recipe: Recipe) -> Iterator[Fault]:
    """What the recipe, and the shape of a seed that is made here, say against what it asks for."""
    if recipe.router.ridge_lambda == CROSS_VALIDATED and recipe.statistics.parts < 2:
        remedy = "a cross-validated router.ridge_lambda needs 2 or more; leave it out for 4"
        yield Fault("statistics.folds", recipe.statistics.folds, remedy)
    if recipe.trains_seed and not recipe.moe.normalise_top_k:
        yield from FAMILIES[recipe.seed_model.shape.family].normalising_faults()
    yield from _repair_faults(recipe)


def _repair_faults(recipe: Recipe) -> Iterator[Fault]:
    """The same against a repair."""
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
    asked = (*asked, *weight_keys(recipe))
    for key in asked:
        remedy = f"is done by dume alone, and the method is {recipe.method}: remove it"
        yield Fault(key, value_at(recipe, key), remedy)
