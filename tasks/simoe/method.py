"""SIMoE: sparse interpolated experts, found in a dense model by instruction tuning."""

from infra.recipe.schema import SIMOE
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.instructions import instructions
from tasks.data.seed import seed
from tasks.data.sources import sources
from tasks.data.tokenizer import tokenizer
from tasks.engine.method import Method
from tasks.simoe.answers import answers
from tasks.simoe.checks import FIGURES, simoe_faults
from tasks.simoe.model import baselines, model
from tasks.simoe.report import report

METHOD = Method(
    name=SIMOE,
    title="SIMoE",
    paper="arXiv 2506.12597",
    stages=(
        sources,
        documents,
        tokenizer,
        corpora,
        seed,
        instructions,
        baselines,
        model,
        answers,
        report,
    ),
    checks=simoe_faults,
    figures=lambda recipe: FIGURES,
)
