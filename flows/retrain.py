"""New text, or nothing to do: a model goes on learning, night by night.

``python -m flows.retrain RECIPE [--set dotted.key=value ...]``

Where nothing is new it ends within seconds; on the command line without a run in Prefect. New text
in a domain: its expert is continued from the one that is there, its statistics are computed again
on the same backbone, the router is solved, the model assembled, judged beside the champion and
offered to the registry. Models that share no seed are continued too, and joined again; with SIMoE
new instructions tune the same seed again.
"""

import sys

from prefect import flow
from prefect.runtime import deployment
from prefect.states import Completed, State

from flows.making.building import built
from flows.making.builds import aim, build
from flows.making.change import (
    begin_change,
    domain_faults,
    finish_change,
    going_on,
    modelled_in,
)
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.naming import completed, name_run, title_of_day, words_of
from flows.running.refused import in_a_line
from flows.running.session import THREADS, FlowSession, open_session
from flows.running.turn import log, turn
from infra.recipe.schema import Recipe, resolve
from infra.settings import configure
from infra.tracking.registry import Registry
from tasks.engine.stage import Session
from tasks.engine.workspace import Held, Workspace
from tasks.living.freshness import news, outdated
from tasks.living.lineage import begin, check_built_upon, life_of, with_lineage
from tasks.recipes import validate
from tasks.release.history import PENDING_TAG, catch_up
from tasks.release.versions import MODEL_TAG, Outcome, newest
from upcycle_core.errors import raise_faults

NOTHING = "nothing to do"


@flow(name="retrain", task_runner=THREADS)
@in_a_line
def retrain(recipe: Recipe) -> State:
    """Bring new text into the recipe's model.

    Args:
        recipe: Of a model that has been built (`flows.dume`), with the same domains.

    Returns:
        The registered version, ``models:/NAME/NUMBER``; or a state that says "nothing to do", or
        for whom a night waited in vain: the next one finds the same text.
    """
    recipe = validate(resolve(recipe))
    workspace = Workspace(configure().home / recipe.name)
    try:
        with turn(workspace, "the flow retrain", recipe):
            said = look(recipe, workspace)
            if said is not None:
                log(said)
                title = title_of_day(recipe.name)
                name_run(title, tags=(recipe.name,))
                return completed(title, NOTHING, name="Nothing to do")
            ahead = aim(recipe)
            with open_session("retrain", recipe, is_held=True, begun=begin, aim=ahead) as session:
                outcome = _learn(session)
                return session.completed(words_of(outcome), outcome.version.reference)
    except Held as held:
        if deployment.id is None:  # a command, that somebody waits for
            raise
        log(f"skipped: {held}")
        return Completed(message=str(held), name="Skipped")


def look(recipe: Recipe, workspace: Workspace) -> str | None:
    """Refuse a recipe that is not the model's, and see whether anything is new.

    Args:
        recipe: What is asked for.
        workspace: It is locked.

    Returns:
        What to say where there is nothing to do.

    Raises:
        InputError: With every domain that came or left; or with what is built upon and is not what
            the recipe asks for.
    """
    life = life_of(recipe)
    known = modelled_in(recipe, workspace)
    raise_faults(domain_faults(life.section, life.parts(recipe), known))
    return f"{recipe.name}: {NOTHING}" if _is_up_to_date(recipe, workspace) else None


def _is_up_to_date(recipe: Recipe, workspace: Workspace) -> bool:
    """Whether the registered model is what this recipe and what lies outside make."""
    recipe = with_lineage(recipe, workspace)
    begun = recipe if recipe.lineage is None else begin(recipe, workspace)
    session = Session(begun, workspace, log=lambda text: None)
    check_built_upon(session)
    if (
        going_on(recipe, workspace) is not None
        or news(session).any
        or outdated(session, built(session.recipe))
    ):
        return False
    registry, name = Registry(configure()), recipe.registered_name
    versions = catch_up(registry, name)  # a champion that a person made, or an earlier release
    known = newest(versions, recipe=recipe.name)
    if known is None or PENDING_TAG in known.tags:
        return False
    return workspace.has_digest("model", known.tags.get(MODEL_TAG))


def _learn(session: FlowSession) -> Outcome:
    """Continue the experts that have new text, and build the model."""
    begun = begin(session.recipe, session.workspace)
    stopped = going_on(session.recipe, session.workspace)
    what = " ".join(["retrain", *news(session.stages).domains])
    change = begin_change(session, what if stopped is None else stopped.what, begun)
    session.adopt(begun)
    for stage in life_of(session.recipe).reads:
        session.ensure(stage)
    outcome = build(session)
    parents = [f"{d} from {digest[:12]}" for d, digest in session.recipe.parents.items()]
    notes = (f"Continued experts: {', '.join(parents)}.",) if parents else ()
    finish_change(session, change, outcome, notes=notes)
    return outcome


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    recipe = load(parser_of("retrain").parse_args(arguments))
    run_flow(recipe, retrain, look=look, begun=begin, aim=aim(recipe))


if __name__ == "__main__":
    sys.exit(main())
