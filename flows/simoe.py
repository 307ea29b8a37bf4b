"""SIMoE end to end: instructions and a dense model in, one model with sparse experts registered.

``python -m flows.simoe RECIPE [ROWS ...] [--set dotted.key=value ...] [--seeds S ...] [--out F]``

The first file is a recipe with a ``simoe`` section. The others hold ``baselines:``, rivals and
ablations that are tuned and judged beside it. With ``--seeds`` it runs once a seed, each in a
workspace of its own (``NAME-seed-0``, ...).
"""

import sys
from collections.abc import Callable, Collection

from prefect import flow
from prefect.states import State

from flows.making.building import made
from flows.pages.instructions import publish_tuning, write_instructions
from flows.pages.model import folder_faults
from flows.pages.page import Command
from flows.pages.tasks import publish_tasks
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow, with_seed
from flows.running.refused import in_a_line
from flows.running.session import THREADS, FlowSession
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.methods import scored_models, stages_of
from tasks.recipes import validate
from tasks.release.champion import standing_champion
from tasks.release.task_table import task_table
from tasks.release.versions import Outcome
from tasks.simoe.model import baselines, model
from tasks.simoe.register import register_tuned
from upcycle_core.errors import Fault, raise_faults


@flow(name="simoe", task_runner=THREADS)
@in_a_line
def simoe(recipe: Recipe, rebuild: bool = False) -> State:
    """Tune a dense model on instructions, with sparse experts, into the MLflow registry.

    Args:
        recipe: What to make; ``baselines`` are further rows of its table.
        rebuild: Make the seed anew too, where later models were built upon it.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    return made("simoe", recipe, build, rebuild=rebuild)


def build(
    session: FlowSession,
    *,
    changed: Collection[str] | None = None,
    also: Callable[[FlowSession], None] = lambda session: None,
) -> Outcome:
    """Bring every stage up to date, judge the model beside the champion, and register it.

    Args:
        session: The recipe at work.
        changed: Sets of instructions; all are tuned on together, whichever changed.
        also: Makes what is asked for beside the model, before that is registered.
    """
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
    session.workspace.sweep()
    return outcome


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.simoe is not None:
        return []
    remedy = "says how experts are found; add it (recipes/simoe.yaml has one), or run flows.dume"
    return [Fault("simoe", None, remedy)]


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on recipe files."""
    chosen = parser_of("simoe").parse_args(arguments)
    recipe = load(chosen)
    home = environment.configure().home
    raise_faults([*_faults(recipe), *folder_faults(chosen.out)])
    runs = [with_seed(recipe, seed) for seed in chosen.seeds or ()] or [recipe]
    for run in runs:
        run_flow(run, lambda recipe: simoe(recipe, chosen.rebuild))
    if chosen.out is not None:
        made = Command.of("simoe", recipe, chosen)
        write_instructions(made, [home / run.name for run in runs])


if __name__ == "__main__":
    sys.exit(main())
