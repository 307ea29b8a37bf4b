"""DeRS: experts of a finished model as one shared base and light deltas, the smallest registered.

``python -m flows.ders RECIPE COMPRESSION [ROWS ...] [--set dotted.key=value ...] [--out FOLDER]``

The first file is the recipe of ``flows.dume``; what has been made is used again. Another holds
``compression:``, the ways to store deltas, and maybe ``baselines:``, models to compress as well.
"""

import sys

from prefect import flow
from prefect.states import State

from flows.making.ders import SUMMARY, compress, compressed, offer
from flows.pages.compression import write_compression
from flows.pages.model import folder_faults
from flows.pages.page import Command
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.naming import words_of
from flows.running.refused import in_a_line
from flows.running.session import THREADS, open_session
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.dume.method import METHOD as DUME
from tasks.engine.stage import Stage
from tasks.planning.made import Aim
from tasks.recipes import validate
from upcycle_core.errors import Fault, raise_faults


def _stages(recipe: Recipe) -> dict[Stage, list[str]]:
    """What is made: stages, and their items."""
    return {stage: stage.items(recipe) for stage in DUME.stages()} | compressed(recipe)


AIM = Aim(_stages, registers=("compression",))


@flow(name="ders", task_runner=THREADS)
@in_a_line
def ders(recipe: Recipe) -> State:
    """Store the experts of the recipe's model as a base and deltas; register the smallest.

    Args:
        recipe: What to make; ``compression`` says in which ways, and how much may be lost.

    Returns:
        The registered version, ``models:/NAME/NUMBER``; None if no way is good enough.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    with open_session("ders", recipe, aim=AIM) as session:
        for stage in DUME.stages():
            session.ensure(stage)
        compress(session)
        session.finish()
        outcome = offer(session)
        if outcome is None:
            return session.completed("no way to store deltas is within the tolerance")
        return session.completed(words_of(outcome), outcome.version.reference)


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.compression is not None:
        return []
    remedy = "says how deltas are stored; add a file that does, e.g. recipes/compression.yaml"
    return [Fault("compression", None, remedy)]


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on recipe files."""
    chosen = parser_of("ders").parse_args(arguments)
    recipe = load(chosen)
    raise_faults([*_faults(recipe), *folder_faults(chosen.out)])
    run_flow(recipe, ders, aim=AIM, shown=SUMMARY)
    if chosen.out is not None:
        workspace = environment.configure().home / recipe.name
        write_compression(Command.of("ders", recipe, chosen), workspace)


if __name__ == "__main__":
    sys.exit(main())
