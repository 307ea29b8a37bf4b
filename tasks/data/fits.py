"""Whether what a recipe names goes together with what it asks for, from models' headers alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from infra.recipe.schema import Recipe
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import LM_HEAD
from upcycle_core.ders.checks import rank_faults
from upcycle_core.dume.checks import check_repairable, fewest_tokens
from upcycle_core.errors import Fault, InputError


def fit_faults(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Fault]:
    """What models that are sound, and can become one, do not let be done with them.

    Args:
        recipe: What to make.
        config: What is in the first given model's config.json; None where none is given.
    """
    yield from _head_faults(recipe, config)
    if config is not None:
        yield from _repair_faults(recipe, config)
        yield from _rank_faults(recipe, config)
        yield from _weight_faults(recipe, config)


def _repair_faults(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Fault]:
    """What the models, or the text that is asked for, say against a repair."""
    if recipe.experts.repair == "none":
        return
    asked, field = recipe.statistics.tokens, "statistics.tokens"
    enough = fewest_tokens(config) if asked is None else asked
    try:
        check_repairable(family_of(config), config, enough, field)
    except InputError as error:
        yield from error.faults


def _head_faults(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Fault]:
    """A head that is to be merged by counts, of models that have none beside their embedding."""
    merge = recipe.backbone.merge
    if merge.head != "counts" or merge.embeddings == "counts" or recipe.lineage is not None:
        return
    if config is not None:
        is_tied = LM_HEAD not in family_of(config).tensors(config, ffn=False)
    else:
        is_tied = recipe.seed_model.shape.tie_embeddings
    if is_tied:
        remedy = "the head is the embedding, which is merged by backbone.merge.embeddings: set "
        remedy += "that to counts, and remove this"
        yield Fault("backbone.merge.head", merge.head, remedy)


def type_faults(recipe: Recipe) -> Iterator[Fault]:
    """A type that ready experts get, and those that are trained here beside them do not end in."""
    asked, experts = recipe.experts.dtype, recipe.experts
    trained = {name for name, domain in recipe.domains.items() if domain.expert is None}
    if asked in ("auto", "fp32") or len(trained) == len(recipe.domains):
        return
    how = {n: experts.continuing if n in recipe.parents else experts.training for n in trained}
    whole = sorted(name for name, training in how.items() if training.method != "lora")
    if whole:
        remedy = f"what is trained here ({', '.join(whole)}) is fp32, and all experts have one "
        remedy += "type: use auto or fp32, or train with method: lora"
        yield Fault("experts.dtype", asked, remedy)


def _rank_faults(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Fault]:
    """Ranks of deltas above the models' matrices."""
    sizes = int(config["hidden_size"]), int(config["intermediate_size"])
    yield from rank_faults(recipe.delta_ranks, *sizes)


def _weight_faults(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Fault]:
    """What the models say against weights of experts that do not sum to one."""
    if not recipe.moe.normalise_top_k:
        yield from family_of(config).normalising_faults()
