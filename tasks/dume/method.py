"""DUME: experts of one seed, an averaged backbone, and routers in closed form."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.recipe.schema import Recipe
from tasks.dume.checks import dume_faults, unused_faults, with_folds
from tasks.engine.method import Looks, Method
from upcycle_core.errors import Fault

if TYPE_CHECKING:
    from tasks.engine.life import Life
    from tasks.engine.stage import Stage


def _stages() -> "tuple[Stage, ...]":
    from tasks.data.corpora import corpora
    from tasks.data.documents import documents
    from tasks.data.seed import seed
    from tasks.data.seed_text import seed_text
    from tasks.data.sources import sources
    from tasks.data.tokenizer import tokenizer
    from tasks.dume.backbone import backbone
    from tasks.dume.experts import experts, parents
    from tasks.dume.model import model
    from tasks.dume.repaired import repaired
    from tasks.dume.report import report
    from tasks.dume.routed import routed
    from tasks.dume.router import router
    from tasks.dume.statistics import statistics

    return (
        sources,
        documents,
        tokenizer,
        corpora,
        seed_text,
        seed,
        parents,
        experts,
        backbone,
        repaired,
        statistics,
        router,
        routed,
        model,
        report,
    )


def _outside(recipe: Recipe, models: Path) -> list[Fault]:
    from tasks.data.sources import outside_faults

    return outside_faults(recipe, models)


def _before() -> Mapping[str, Looks]:
    from tasks.dume.prepared import text_faults

    return {"seed": text_faults}  # the first that is trained


def _life() -> "Life":
    from tasks.dume.life import LIFE

    return LIFE


METHOD = Method(
    name="dume",
    title="DUME",
    paper="arXiv 2603.29765",
    stages=_stages,
    outside=_outside,
    checks=dume_faults,
    before=_before,
    completed=with_folds,
    unused=unused_faults,
    compares=True,
    flow="flows.dume",
    life=_life,
)
