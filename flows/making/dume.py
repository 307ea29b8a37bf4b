"""How DUME's model is brought up to date, stage by stage."""

from collections.abc import Callable, Sequence

from flows.making.building import built, check_champion, looked_at, publish
from flows.running.session import FlowSession
from infra.recipe.schema import Recipe
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
from tasks.engine.stage import Stage
from tasks.methods import COMPRESSION, TASKS, own_models
from tasks.release.versions import Outcome


def updated(recipe: Recipe) -> dict[Stage, list[str]]:
    """What ``build`` brings up to date: stages, and their items."""
    return {s: items for s, items in built(recipe).items() if s not in COMPRESSION.stages()}


def build(
    session: FlowSession,
    *,
    changed: Sequence[str] | None = None,
    also: Callable[[FlowSession], None] = lambda session: None,
) -> Outcome:
    """As ``build_stages``, without the rows that a comparison adds."""
    session.ensure(sources)
    session.ensure(documents, only=changed)
    has_tasks = TASKS.asked(session.recipe)
    if has_tasks:
        session.ensure(TASKS.stages()[0])
    session.ensure(tokenizer)
    session.ensure(corpora, only=changed)
    check_champion(session)
    session.ensure(seed_text)
    session.ensure(seed)
    session.ensure(parents)
    session.ensure(experts, only=looked_at(session, changed))
    session.ensure(backbone)
    session.ensure(repaired)
    session.ensure(statistics)
    session.ensure(router)
    session.ensure(routed)
    session.ensure(model)
    session.ensure(report)
    own = own_models(session.recipe)
    if has_tasks:
        _, task_scores, task_routing = TASKS.stages()
        session.ensure(task_scores, only=own)
        session.ensure(task_routing)
    also(session)
    session.finish()
    return publish(session, own)
