"""How SIMoE's model is brought up to date: with its rivals, where the recipe has some."""

from collections.abc import Callable, Collection

from flows.pages.instructions import publish_tuning
from flows.pages.tasks import publish_tasks
from flows.running.session import FlowSession
from tasks.methods import scored_models, stages_of
from tasks.release.champion import standing_champion
from tasks.release.task_table import task_table
from tasks.release.versions import Outcome
from tasks.simoe.model import baselines, model
from tasks.simoe.register import register_tuned


def build(
    session: FlowSession,
    *,
    changed: Collection[str] | None = None,
    also: Callable[[FlowSession], None] = lambda session: None,
) -> Outcome:
    """As ``build_stages``; all sets of instructions are tuned on together, whichever changed."""
    recipe = session.recipe
    for stage in stages_of(recipe):
        if stage is baselines:  # the recipe's own model is one more of the trainings
            session.ensure(model, stage)
        elif stage is not model:
            session.ensure(stage)
    also(session)
    session.finish()
    with standing_champion(session.stages, session.registry) as champion:
        tasks = task_table(session.stages, champion, models=list(scored_models(recipe)))
        outcome = register_tuned(session.registrar, champion)
    publish_tuning(session, outcome)
    if tasks is not None:
        publish_tasks(session, outcome.version, tasks)
    session.workspace.sweep(session.stages.made)
    return outcome
