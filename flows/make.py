"""Any method end to end: a recipe in, its model and report made, judged and registered.

``python -m flows.make RECIPE [FILES ...] [--set dotted.key=value ...] [--rebuild]``

The recipe's ``method`` says how its model is made. Methods with more to say on their command line
have flows of their own: ``flows.dume``, ``flows.symphony``, ``flows.simoe``.
"""

import sys

from prefect import flow
from prefect.states import State

from flows.making.building import made
from flows.making.builds import whole
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.planned import anew_if
from flows.running.refused import in_a_line
from flows.running.session import THREADS
from infra.recipe.schema import Recipe, resolve
from tasks.recipes import validate


@flow(name="make", task_runner=THREADS)
@in_a_line
def make(recipe: Recipe, rebuild: bool = False) -> State:
    """Make the recipe's model by its method, and register it in MLflow.

    Args:
        recipe: What to make.
        rebuild: Make anew what later models were built upon, too.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    return made("make", recipe, whole(recipe), rebuild=rebuild)


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on recipe files."""
    chosen = parser_of("make").parse_args(arguments)
    run_flow(
        load(chosen), lambda recipe: make(recipe, chosen.rebuild), begun=anew_if(chosen.rebuild)
    )


if __name__ == "__main__":
    sys.exit(main())
