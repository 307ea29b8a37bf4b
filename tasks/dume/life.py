"""How DUME's models live on: everybody stays on one tokenizer, seed and backbone."""

from infra.recipe.schema import Recipe
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.sources import sources
from tasks.dume.backbone import averaged
from tasks.engine.life import Life


def pinned(recipe: Recipe) -> list[str]:
    """What statistics and experts of all domains hang on."""
    return [*seed_of(recipe), "backbone"]


def seed_of(recipe: Recipe) -> list[str]:
    """The seed, where there is one, and what it is made of."""
    there = {"seed_text": recipe.seed_text is not None, "seed": recipe.has_seed}
    return ["tokenizer", *(name for name, is_there in there.items() if is_there)]


def _came(recipe: Recipe) -> str:
    return f"The backbone averages {_listed(recipe)}."


def _left(recipe: Recipe, domain: str) -> str:
    if domain in averaged(recipe):
        note = f"The expert of {domain} is still in the backbone's average ({_listed(recipe)})"
        return f"{note}; to take it out there too: flows.shrink RECIPE {domain} --rebuild."
    return _came(recipe)


def _listed(recipe: Recipe) -> str:
    return ", ".join(averaged(recipe))


LIFE = Life(
    pinned=pinned,
    reads=(sources, documents, corpora),
    texts=lambda recipe, domain: [f"corpora/{domain}/train"],
    averages=True,
    came=_came,
    left=_left,
)
