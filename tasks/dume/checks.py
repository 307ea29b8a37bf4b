"""What is wrong with what a recipe says about DUME, without reading any file."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.engine.params import merge_keys, repair_keys, routed_repair_keys, value_at, weight_keys
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.dume.checks import fewest_tokens
from upcycle_core.errors import Fault


def dume_faults(recipe: Recipe) -> Iterator[Fault]:
    """What the recipe, and the shape of a seed that is made here, say against what it asks for."""
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
