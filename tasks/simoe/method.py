"""SIMoE: sparse interpolated experts, found in a dense model by instruction tuning."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.instructions import instructions
from tasks.data.seed import seed
from tasks.data.seed_text import seed_text
from tasks.data.tokenizer import tokenizer
from tasks.engine.method import Method
from tasks.simoe.answers import answers
from tasks.simoe.checks import FIGURES, simoe_faults, unused_faults
from tasks.simoe.life import LIFE
from tasks.simoe.model import baselines, model
from tasks.simoe.report import report
from tasks.simoe.rows import SIMOE
from tasks.simoe.sources import outside_faults, sources


def _lengths(recipe: Recipe) -> Iterator[str]:
    yield "seed_model.training"
    if any(row.method == "btx" for row in recipe.baselines.values()):
        yield "experts.training"


METHOD = Method(
    name=SIMOE,
    title="SIMoE",
    paper="arXiv 2506.12597",
    stages=(
        sources,
        documents,
        tokenizer,
        corpora,
        seed_text,
        seed,
        instructions,
        baselines,
        model,
        answers,
        report,
    ),
    outside=outside_faults,
    checks=simoe_faults,
    unused=unused_faults,
    section=SIMOE,
    figures=lambda recipe: FIGURES,
    models=lambda recipe: {"seed": ("seed",), SIMOE: ("model",)},
    lengths=_lengths,
    has_labels=True,
    flow="flows.simoe",
    life=LIFE,
)
