"""SIMoE: sparse interpolated experts, found in a dense model by instruction tuning."""

from pathlib import Path
from typing import TYPE_CHECKING

from infra.recipe.schema import Recipe
from tasks.engine.method import Method
from tasks.simoe.checks import FIGURES, lengths, simoe_faults, unused_faults
from tasks.simoe.rows import SIMOE
from upcycle_core.errors import Fault

if TYPE_CHECKING:
    from tasks.engine.life import Life
    from tasks.engine.stage import Stage


def _stages() -> "tuple[Stage, ...]":
    from tasks.data.corpora import corpora
    from tasks.data.documents import documents
    from tasks.data.instructions import instructions
    from tasks.data.seed import seed
    from tasks.data.seed_text import seed_text
    from tasks.data.tokenizer import tokenizer
    from tasks.simoe.answers import answers
    from tasks.simoe.model import baselines, model
    from tasks.simoe.report import report
    from tasks.simoe.sources import sources

    return (
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
    )


def _outside(recipe: Recipe, models: Path) -> list[Fault]:
    from tasks.simoe.sources import outside_faults

    return outside_faults(recipe, models)


def _life() -> "Life":
    from tasks.simoe.life import LIFE

    return LIFE


METHOD = Method(
    name=SIMOE,
    title="SIMoE",
    paper="arXiv 2506.12597",
    stages=_stages,
    outside=_outside,
    checks=simoe_faults,
    unused=unused_faults,
    section=SIMOE,
    figures=lambda recipe: FIGURES,
    models=lambda recipe: {"seed": ("seed",), SIMOE: ("model",)},
    lengths=lengths,
    has_labels=True,
    flow="flows.simoe",
    life=_life,
)
