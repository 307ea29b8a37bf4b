"""How joined strangers live on: vocabulary and anchor stay, of models that are trained here too.

Whatever comes, leaves or learns, the models are aligned, merged and trained together again: that
is the method. Models that learnt nothing new are not trained again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from infra.recipe.schema import Recipe
from tasks.data.documents import documents
from tasks.engine.life import Life, without_domain
from tasks.symphony.experts import trained_on
from tasks.symphony.sources import sources
from tasks.symphony.variants import anchor_of, chosen_of, section, with_anchors
from tasks.symphony.vocabulary import sharing
from upcycle_core.symphony.config import SymphonyConfig


def _anchor(recipe: Recipe, known: Sequence[str]) -> str | None:
    """The recipe's, or else the one that was; the next one where that is no expert any more."""
    own, before = section(recipe), recipe.lineage.anchor if recipe.lineage is not None else None
    asked, chosen = (own.anchor, before, *(own.models or known)), chosen_of(recipe, own)
    return next((name for name in asked if name in chosen), None)


def _settled(recipe: Recipe) -> Recipe:
    own, lineage = section(recipe), recipe.lineage
    if own.anchor is not None or lineage is None or lineage.anchor not in chosen_of(recipe, own):
        return recipe
    return with_anchors(replace(recipe, symphony=replace(own, anchor=lineage.anchor)))


def without(recipe: Recipe, domain: str) -> Recipe:
    """The recipe without a domain, and without what it says of its model."""
    recipe = without_domain(recipe, domain)
    post = recipe.post_training
    if post is not None:
        weights = _rest(post.objective.domain_weights, domain)
        post = replace(post, objective=replace(post.objective, domain_weights=weights))
    rows = {
        name: row if row.symphony is None else replace(row, symphony=_left_by(row.symphony, domain))
        for name, row in recipe.baselines.items()
    }
    own = _left_by(section(recipe), domain)
    return replace(recipe, symphony=own, post_training=post, baselines=rows)


def _left_by(config: SymphonyConfig, domain: str) -> SymphonyConfig:
    """A way of joining without a domain. Its rules of segmentation are another's to name."""
    read = config.calibration.domains
    if isinstance(read, tuple):
        read = tuple(name for name in read if name != domain)
    models = config.models
    return replace(
        config,
        models=None if models is None else tuple(name for name in models if name != domain),
        anchor=None if config.anchor == domain else config.anchor,
        merge=replace(config.merge, weights=_rest(config.merge.weights, domain)),
        calibration=replace(config.calibration, domains=read),
    )


def _rest(weights: Mapping[str, float], domain: str) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if name != domain}


def _said(recipe: Recipe) -> str:
    return f"The others are aligned to {anchor_of(recipe, section(recipe))}."


LIFE = Life(
    pinned=lambda recipe: ["vocabulary"] if sharing(recipe) else [],
    reads=(sources, documents),
    texts=trained_on,
    without=without,
    anchor=_anchor,
    settled=_settled,
    came=_said,
    left=lambda recipe, domain: _said(recipe),
)
