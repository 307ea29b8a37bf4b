"""What flows that build or change a DUME model share: its stages, and its registration."""

from collections.abc import Sequence

from flows.pages.model import SUMMARY, publish_artifacts, summary
from flows.pages.tasks import publish_tasks
from flows.running.session import FlowSession
from tasks import pipeline
from tasks.release.champion import standing_champion
from tasks.release.register import register
from tasks.release.versions import Outcome
from tasks.scoring.task_table import task_table

BUILT = (
    pipeline.sources,
    pipeline.documents,
    pipeline.task_sets,
    pipeline.tokenizer,
    pipeline.corpora,
    pipeline.seed,
    pipeline.parents,
    pipeline.experts,
    pipeline.backbone,
    pipeline.statistics,
    pipeline.router,
    pipeline.model,
    pipeline.report,
    pipeline.task_scores,
)
"""Every stage of a DUME model, in order."""
OF_TEXT = (pipeline.documents, pipeline.corpora, pipeline.experts)
"""Those that a domain's text goes through before the domains meet."""


def build(session: FlowSession, *, changed: Sequence[str] | None = None) -> Outcome:
    """Bring every stage up to date, judge the model beside the champion, and register it.

    Args:
        session: The recipe at work.
        changed: Domains whose text and experts are looked at; all by default.
    """
    own = [row for row in session.recipe.scored_models if row in session.recipe.own_models]
    for stage in BUILT:
        if stage is pipeline.task_scores:
            session.ensure(stage, own)
        else:
            session.ensure(stage, changed if stage in OF_TEXT else None)
    session.finish()
    return publish(session, own)


def publish(session: FlowSession, models: Sequence[str]) -> Outcome:
    """Judge the model beside the champion, register it, and show what came of it.

    Args:
        session: All stages are up to date.
        models: What was scored on tasks.
    """
    with standing_champion(session.stages, session.registry) as champion:
        tasks = task_table(session.stages, champion, models=models)
        outcome = register(
            session.stages,
            session.registry,
            session.versions,
            session.run,
            champion=champion,
            tasks=tasks,
        )
    publish_artifacts(session, outcome)
    if tasks is not None:
        publish_tasks(session, outcome.version, tasks)
    session.workspace.sweep()
    (session.workspace.root / SUMMARY).write_text(summary(session, outcome))
    return outcome
