"""What flows that make a model share: the gate, the registration, and what is shown of it."""

from collections.abc import Sequence

from prefect.states import State

from flows.pages.model import publish_artifacts, summary
from flows.pages.tasks import publish_tasks
from flows.running.command_line import SUMMARY
from flows.running.naming import words_of
from flows.running.session import FlowSession, open_session
from infra.recipe.schema import Recipe
from tasks.methods import scored_models, stages_of
from tasks.release.champion import standing_champion
from tasks.release.register import register
from tasks.release.task_table import task_table
from tasks.release.versions import Outcome


def made(flow_name: str, recipe: Recipe) -> State:
    """Bring every stage of a recipe up to date, and register its model.

    Args:
        flow_name: The flow's, for MLflow.
        recipe: What to make.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    with open_session(flow_name, recipe) as session:
        for stage in stages_of(recipe):
            session.ensure(stage)
        session.finish()
        outcome = publish(session, list(scored_models(recipe)))
        return session.completed(words_of(outcome), outcome.version.reference)


def publish(session: FlowSession, models: Sequence[str]) -> Outcome:
    """Judge the model beside the champion, register it, and show what came of it.

    Args:
        session: All stages are up to date.
        models: What was scored on tasks.
    """
    with standing_champion(session.stages, session.registry) as champion:
        tasks = task_table(session.stages, champion, models=models)
        outcome = register(session.registrar, champion, tasks)
    publish_artifacts(session, outcome)
    if tasks is not None:
        publish_tasks(session, outcome.version, tasks)
    session.workspace.sweep()
    (session.workspace.root / SUMMARY).write_text(summary(session, outcome))
    return outcome
