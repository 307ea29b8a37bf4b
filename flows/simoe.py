"""SIMoE end to end: instructions and a dense model in, one model with sparse experts registered.

``python -m flows.simoe RECIPE [ROWS ...] [--set dotted.key=value ...] [--seeds S ...] [--out F]``

The first file is a recipe with a ``simoe`` section. The others hold ``baselines:``, rivals and
ablations that are tuned and judged beside it. With ``--seeds`` it runs once a seed, each in a
workspace of its own (``NAME-seed-0``, ...).
"""

import sys

from prefect import flow
from prefect.states import State

from flows.making.building import made
from flows.making.simoe import build
from flows.pages.instructions import write_instructions
from flows.pages.model import folder_faults
from flows.pages.page import Command
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow, with_seed
from flows.running.planned import anew_if
from flows.running.refused import in_a_line
from flows.running.session import THREADS
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.recipes import validate
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
        run_flow(run, lambda recipe: simoe(recipe, chosen.rebuild), begun=anew_if(chosen.rebuild))
    if chosen.out is not None:
        made = Command.of("simoe", recipe, chosen)
        write_instructions(made, [home / run.name for run in runs])


if __name__ == "__main__":
    sys.exit(main())
