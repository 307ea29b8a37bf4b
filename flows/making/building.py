"""What flows that make a model share: the gate, the registration, and what is shown of it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from prefect.runtime import deployment
from prefect.states import State

from flows.making.change import domain_faults, end_change
from flows.pages.model import publish_artifacts, summary
from flows.pages.tasks import publish_tasks
from flows.running.command_line import SUMMARY
from flows.running.naming import words_of
from flows.running.planned import anew_if
from flows.running.session import FlowSession, open_session
from infra.recipe.schema import Recipe
from tasks.baselines.prepared import row_faults
from tasks.engine.artifacts import FORMS
from tasks.engine.stage import Stage
from tasks.living.freshness import outdated
from tasks.living.lineage import forget
from tasks.methods import COMPARISON, METHODS, TASKS, own_models, scored_models, stages_of
from tasks.planning.made import EVERYTHING, Aim
from tasks.release.champion import standing_champion
from tasks.release.comparable import champion_faults
from tasks.release.register import register
from tasks.release.task_table import task_table
from tasks.release.versions import MODEL_TAG, Outcome, newest
from upcycle_core.errors import Fault, raise_faults

Build = Callable[..., Outcome]
"""What brings a session's model up to date and registers it; see ``build_stages``."""


def made(
    flow_name: str,
    recipe: Recipe,
    build: Build | None = None,
    *,
    rebuild: bool = False,
    aim: Aim = EVERYTHING,
) -> State:
    """Bring a recipe's model up to date, and register it.

    Args:
        flow_name: The flow's, for MLflow.
        recipe: What to make.
        build: Brings a session's model up to date; ``build_stages`` by default.
        rebuild: Make anew what later models were built upon.
        aim: What ``build`` brings up to date.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    with open_session(flow_name, recipe, begun=anew_if(rebuild), aim=aim) as session:
        if deployment.id is not None and not rebuild:
            raise_faults(stale_faults(session))
        if rebuild:
            forget(session.workspace)
            session.adopt(replace(recipe, lineage=None))
        outcome = (build or build_stages)(session)
        end_change(session)
        return session.completed(words_of(outcome), outcome.version.reference)


def stale_faults(session: FlowSession) -> list[Fault]:
    """Domains that came or left since: a deployment holds its recipe as it was, and would undo it.

    Args:
        session: The workspace is held. A model that is not yet built upon is what its recipe says.
    """
    life = METHODS[session.recipe.method].life
    if life is None or session.recipe.lineage is None:
        return []
    own, known = life(), life().modelled(session.workspace)
    return domain_faults(own.section, own.parts(session.recipe), known) if known else []


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
        if stage.name == "sources":
            raise_faults(row_faults(session.stages))
        if stage.name == "corpora":
            check_champion(session)
    also(session)
    session.finish()
    return publish(session, list(scored_models(session.recipe)))


def check_champion(session: FlowSession) -> None:
    """See that a new model can be judged beside the champion, before one is made.

    Args:
        session: Its corpora are up to date.

    Raises:
        InputError: Something is to be made, or registered, and the champion's tokenizer cannot
            read what both are judged on.
    """
    faults = list(champion_faults(session.stages, session.registry))
    if not faults:
        return
    recipe = session.recipe
    known = newest(session.registry.versions(recipe.registered_name), recipe=recipe.name)
    is_known = known is not None and session.workspace.has_digest(
        "model", known.tags.get(MODEL_TAG)
    )
    # A report alone asks the champion nothing.
    made = {stage: items for stage, items in built(recipe).items() if stage.name != "report"}
    if not is_known or outdated(session.stages, made):
        raise_faults(faults)


def built(recipe: Recipe) -> dict[Stage, list[str]]:
    """What a build brings up to date, beside rows to compare with: stages, and their items."""
    found = {s: s.items(recipe) for s in stages_of(recipe) if s not in COMPARISON.stages()}
    _, task_scores, _ = TASKS.stages()
    return found | ({task_scores: own_models(recipe)} if task_scores in found else {})


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
