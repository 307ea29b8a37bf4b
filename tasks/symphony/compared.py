"""Which joined models the stage ``similarity`` looks at."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.symphony.variants import SYMPHONY, chosen_of, variants
from upcycle_core.symphony.config import AlignmentConfig

STATES = {"before": "before post-training", "after": "after post-training"}


def compared(recipe: Recipe) -> dict[str, str]:
    """{variant: what the page calls its experts}: the first of each kind of alignment."""
    found: dict[str, str] = {}
    for name, variant in variants(recipe).items():
        title = _title(variant.alignment)
        whole = len(chosen_of(recipe, variant)) == len(recipe.domains)
        if whole and title not in found.values():
            found[name] = title
    return {name: found[name] for name in sorted(found, key=lambda n: len(found[n]))}


def _title(alignment: AlignmentConfig) -> str:
    parts = {
        "neurons": alignment.neurons != "none",
        "residual": alignment.residual != "none",
        "heads": alignment.heads != "none",
    }
    named = [part for part, is_on in parts.items() if is_on]
    return f"aligned {' + '.join(named)}" if named else "unaligned"


def looked_at(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Key, title and artifact of every MoE that is looked at."""
    for name, title in compared(recipe).items():
        yield f"{name}.before", f"{title}, {STATES['before']}", f"starts/{name}"
        if name != SYMPHONY:
            yield f"{name}.after", f"{title}, {STATES['after']}", f"baselines/{name}"
        elif recipe.post_training is not None:
            yield f"{name}.after", f"{title}, {STATES['after']}", "model"
