"""Licences of the models that a recipe names, and of what is made of them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from huggingface_hub import ModelCard

from infra import settings as environment
from infra.recipe.schema import Recipe
from tasks.data.given import REGISTERED
from upcycle_core.errors import Fault
from upcycle_core.given import licence

FILE = "licences.json"
"""Of ``sources/``: {part: its licence; null where none is stated}."""
CARD = "card.md"
"""Of a registered version, beside its checkpoint: where its licence stands."""


def stated_licences(recipe: Recipe, cache: Path) -> dict[str, str | None]:
    """{part: the licence that it states}, of every model that the recipe names.

    A part is the field that names it; ``FIELD, base`` is what an adapter was trained on.
    """
    named = {}
    for name, domain in recipe.domains.items():
        named[f"domains.{name}.expert"] = domain.expert
        if domain.expert is None and domain.origin is not None:
            named[f"domains.{name}.origin.model"] = domain.origin.model
    named["seed_model.model"] = recipe.seed_model.model
    found = {}
    for field, model in named.items():
        if model is not None:
            own, *base = _licences(model, cache).values()
            found[field] = own
            found |= {f"{field}, base": one for one in base}
    return found


def licence_faults(recipe: Recipe, cache: Path) -> Iterator[Fault]:
    """Models whose licence forbids what the recipe makes of them."""
    accepted = recipe.registry.accept_licences
    return licence.faults(stated_licences(recipe, cache), accepted)


def _licences(model: str, cache: Path) -> Mapping[str, str | None]:
    if not model.startswith(REGISTERED):
        return licence.licences_of(model, cache)
    from infra.tracking.registry import Registry  # imports MLflow

    registry = Registry(environment.configure())
    text = registry.text(registry.referenced(model), CARD)
    stated = None if text is None else ModelCard(text).data.get("license")
    return {model: None if stated in (None, licence.UNKNOWN) else str(stated)}
