"""Symphony-MoE: models that share no seed, brought into one coordinate system and joined."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.recipe.schema import Recipe
from tasks.dume.checks import CROSS_VALIDATED, with_folds
from tasks.engine.method import Looks, Method, Models, models_of_one_seed
from tasks.symphony.checks import symphony_faults, unused_faults
from tasks.symphony.variants import (
    SYMPHONY,
    chosen_of,
    lengths,
    section,
    solves_routers,
    trains_shape,
    with_anchors,
)
from upcycle_core.errors import Fault

if TYPE_CHECKING:
    from tasks.engine.life import Life
    from tasks.engine.stage import Stage


def _models(recipe: Recipe) -> Models:
    """As of one seed, but for that: strangers are averaged over one vocabulary, and harmonised."""
    rows = {row: own for row, own in models_of_one_seed(recipe).items() if row != "seed"}
    made = {SYMPHONY: rows.pop(SYMPHONY)}
    before = {"harmonised": (f"starts/{SYMPHONY}",)} if recipe.post_training is not None else {}
    return {
        **rows,
        "model_averaging": tuple(f"united/{domain}" for domain in recipe.domains),
        **before,
        **made,
    }


def _completed(recipe: Recipe) -> Recipe:
    """With the rows' anchors, and the folds that a lambda is chosen on; else folds decide nothing,
    and stay as models were recorded without them."""
    chosen = solves_routers(recipe) and recipe.router.ridge_lambda == CROSS_VALIDATED
    return with_anchors(with_folds(recipe) if chosen else recipe)


def _stages() -> "tuple[Stage, ...]":
    from tasks.data.corpora import corpora
    from tasks.data.documents import documents
    from tasks.data.outside import outside
    from tasks.dume.experts import parents
    from tasks.symphony.experts import experts
    from tasks.symphony.initial import starts
    from tasks.symphony.model import baselines, model
    from tasks.symphony.pairs import pairs
    from tasks.symphony.report import report
    from tasks.symphony.similarity import similarity
    from tasks.symphony.sources import sources
    from tasks.symphony.unified import united
    from tasks.symphony.vocabulary import tokenizer, vocabulary

    return (
        sources,
        documents,
        vocabulary,
        parents,
        experts,
        tokenizer,
        corpora,
        outside,
        united,
        pairs,
        starts,
        baselines,
        model,
        report,
        similarity,
    )


def _outside(recipe: Recipe, models: Path) -> list[Fault]:
    from tasks.symphony.sources import outside_faults

    return outside_faults(recipe, models)


def _before() -> Mapping[str, Looks]:
    from tasks.symphony.prepared import corpus_faults, expert_faults

    return {"experts": expert_faults, "united": corpus_faults}


def _life() -> "Life":
    from tasks.symphony.life import LIFE

    return LIFE


METHOD = Method(
    name=SYMPHONY,
    title="Symphony-MoE",
    paper="arXiv 2509.18542",
    stages=_stages,
    outside=_outside,
    checks=symphony_faults,
    before=_before,
    unused=unused_faults,
    section=SYMPHONY,
    completed=_completed,
    experts=lambda recipe: chosen_of(recipe, section(recipe)),
    models=_models,
    lengths=lengths,
    trains_shape=trains_shape,
    has_seed=False,
    ablates=True,
    flow="flows.symphony",
    life=_life,
)
