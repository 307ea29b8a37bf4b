"""How joined strangers live on: vocabulary and anchor stay, of models that are trained here too.

Whatever comes, leaves or learns, the models are aligned, merged and trained together again: that
is the method. Models that learnt nothing new are not trained again.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from infra.recipe.schema import Recipe
from tasks.data.documents import documents
from tasks.engine.life import Life, experts_in, without_domain, without_names
from tasks.engine.params import recorded_setting
from tasks.engine.workspace import Workspace
from tasks.symphony.experts import trained_on
from tasks.symphony.sources import sources
from tasks.symphony.variants import SYMPHONY, anchor_of, chosen_of, section, with_anchors
from tasks.symphony.vocabulary import sharing
from upcycle_core.symphony.config import SymphonyConfig

TOKENIZER, SEGMENTATION = "tokenizer", "symphony.segmentation"


def _anchor(recipe: Recipe, known: Sequence[str]) -> str | None:
    """The recipe's, or else the one that was; the next one where that is no expert any more."""
    own, before = section(recipe), recipe.lineage.anchor if recipe.lineage is not None else None
    asked, chosen = (own.anchor, before, *(own.models or known)), chosen_of(recipe, own)
    return next((name for name in asked if name in chosen), None)


def _settled(recipe: Recipe, workspace: Workspace) -> Recipe:
    """With the anchor and the tokenizer that were, where the recipe names none.

    They are said where the default has become another one, and where they were said: what is made
    with the same names is made no other way.
    """
    own, lineage = section(recipe), recipe.lineage
    if lineage is None:
        return recipe
    anchor, segmentation = lineage.anchor, _ruling(workspace)
    said = _recorded(workspace, f"starts/{SYMPHONY}", "symphony.anchor") is not None
    is_default = anchor == anchor_of(recipe, own) and not said
    if own.anchor is None and anchor in chosen_of(recipe, own) and not is_default:
        own = replace(own, anchor=anchor)
    said = _recorded(workspace, TOKENIZER, SEGMENTATION) is not None
    is_default = segmentation == next(iter(recipe.domains)) and not said
    if own.segmentation is None and segmentation in recipe.domains and not is_default:
        own = replace(own, segmentation=segmentation)
    return recipe if own == section(recipe) else with_anchors(replace(recipe, symphony=own))


def _ruling(workspace: Workspace) -> str | None:
    """The domain whose tokenizer the model's was made of: the first where none was named."""
    named = _recorded(workspace, TOKENIZER, SEGMENTATION)
    return named or next(iter(experts_in(sorted(workspace.inputs(TOKENIZER)))), None)


def _recorded(workspace: Workspace, artifact: str, key: str) -> Any:
    """What the recipe said at a dotted key when an artifact was made."""
    with suppress(KeyError):
        return recorded_setting((workspace.record(artifact) or {})["params"], key)
    return None


def without(recipe: Recipe, domain: str) -> Recipe:
    """The recipe without a domain, and without what it says of its model."""
    recipe = without_domain(recipe, domain)
    post = recipe.post_training
    if post is not None:
        weights = without_names(post.objective.domain_weights, domain)
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
        merge=replace(config.merge, weights=without_names(config.merge.weights, domain)),
        calibration=replace(config.calibration, domains=read),
    )


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
