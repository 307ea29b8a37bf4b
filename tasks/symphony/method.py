"""Symphony-MoE: models that share no seed, brought into one coordinate system and joined."""

from infra.recipe.checks import text_figures
from infra.recipe.schema import SYMPHONY
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.outside import outside
from tasks.data.sources import sources
from tasks.engine.method import Method
from tasks.symphony.checks import symphony_faults
from tasks.symphony.experts import experts
from tasks.symphony.initial import starts
from tasks.symphony.model import baselines, model
from tasks.symphony.pairs import pairs
from tasks.symphony.report import report
from tasks.symphony.similarity import similarity
from tasks.symphony.unified import united
from tasks.symphony.vocabulary import tokenizer

METHOD = Method(
    name=SYMPHONY,
    title="Symphony-MoE",
    paper="arXiv 2509.18542",
    stages=(
        sources,
        documents,
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
    checks=symphony_faults,
    figures=text_figures,
)
