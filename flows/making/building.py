"""What flows that make a model share: the gate, the registration, and what is shown of it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from prefect.states import State

from flows.pages.model import publish_artifacts, summary
from flows.pages.tasks import publish_tasks
from flows.running.command_line import SUMMARY
from flows.running.naming import words_of
from flows.running.session import FlowSession, open_session
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import FORMS
from tasks.living.lineage import forget
from tasks.methods import scored_models, stages_of
from tasks.release.champion import standing_champion
from tasks.release.register import register
from tasks.release.task_table import task_table
from tasks.release.versions import Outcome

Build = Callable[..., Outcome]
"""What brings a session's model up to date and registers it; see ``build_stages``."""


def made(
    flow_name: str, recipe: Recipe, build: Build | None = None, *, rebuild: bool = False
) -> State:
    """Bring a recipe's model up to date, and register it.

    Args:
        flow_name: The flow's, for MLflow.
        recipe: What to make.
        build: Brings a session's model up to date; ``build_stages`` by default.
        rebuild: Make anew what later models were built upon.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    with open_session(flow_name, recipe) as session:
        if rebuild:
            forget(session.workspace)
            session.adopt(replace(recipe, lineage=None))
        outcome = (build or build_stages)(session)
        return session.completed(words_of(outcome), outcome.version.reference)


def build_stages(
    session: FlowSession,
    *,
    changed: Collection[str] | None = None,
    also: Callable[[FlowSession], None] = lambda session: None,
) -> Outcome:
    """Bring every stage of the recipe up to date, judge the model, and register it.

    Args:
        session: The recipe at work.
        changed: Domains whose text and experts are looked at; all by default.
        also: Makes what is asked for beside the model, before that is registered.
    """
    for stage in stages_of(session.recipe):
        session.ensure(stage, only=looked_at(session, changed) if stage.by_text else None)
    also(session)
    session.finish()
    return publish(session, list(scored_models(session.recipe)))


def looked_at(session: FlowSession, changed: Collection[str] | None) -> Collection[str] | None:
    """Domains that have changed, and those whose given experts take another form than they have.

    One that comes with tokens of its own gives all of them more rows.

    Args:
        session: Its sources are up to date.
        changed: Domains; None for all.
    """
    if changed is None:
        return None
    workspace, own = session.workspace, set(changed)
    for name, domain in session.recipe.domains.items():
        form = f"sources/{FORMS}/{name}"
        had = workspace.inputs(f"experts/{name}").get(form)
        if domain.expert is not None and had is not None and workspace.digest(form) != had:
            own.add(name)
    return own


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
    session.workspace.sweep(session.stages.made)
    (session.workspace.root / SUMMARY).write_text(summary(session, outcome))
    return outcome
