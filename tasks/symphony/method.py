"""Symphony-MoE: models that share no seed, brought into one coordinate system and joined."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.outside import outside
from tasks.dume.experts import parents
from tasks.engine.method import Method, Models, models_of_one_seed
from tasks.engine.stage import each
from tasks.symphony.checks import symphony_faults, unused_faults
from tasks.symphony.experts import experts
from tasks.symphony.initial import starts
from tasks.symphony.life import LIFE
from tasks.symphony.model import baselines, model
from tasks.symphony.pairs import pairs
from tasks.symphony.report import report
from tasks.symphony.similarity import similarity
from tasks.symphony.sources import outside_faults, sources
from tasks.symphony.unified import united
from tasks.symphony.variants import SYMPHONY, section, trains_shape, with_anchors
from tasks.symphony.vocabulary import tokenizer, vocabulary


def _models(recipe: Recipe) -> Models:
    """As of one seed, but for that: strangers are averaged over one vocabulary, and harmonised."""
    rows = {row: own for row, own in models_of_one_seed(recipe).items() if row != "seed"}
    made = {SYMPHONY: rows.pop(SYMPHONY)}
    before = {"harmonised": (f"starts/{SYMPHONY}",)} if recipe.post_training is not None else {}
    return {**rows, "model_averaging": tuple(each(recipe, "united/{domain}")), **before, **made}


def _lengths(recipe: Recipe) -> Iterator[str]:
    yield from ("experts.training", "evaluation", "symphony.calibration")
    if section(recipe).router == "ridge":
        yield "statistics"
    if recipe.post_training is not None:
        yield "post_training.training"


METHOD = Method(
    name=SYMPHONY,
    title="Symphony-MoE",
    paper="arXiv 2509.18542",
    stages=(
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
    ),
    outside=outside_faults,
    checks=symphony_faults,
    unused=unused_faults,
    section=SYMPHONY,
    completed=with_anchors,
    models=_models,
    lengths=_lengths,
    trains_shape=trains_shape,
    has_seed=False,
    flow="flows.symphony",
    life=LIFE,
)
