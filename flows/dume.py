"""DUME end to end: text or ready experts in, a registered stock-format MoE out.

``python -m flows.dume recipes/demo.yaml [--set dotted.key=value ...] [--rebuild]``
"""

import sys

from prefect import flow
from prefect.states import State

from flows.making.building import made
from flows.making.dume import build, updated
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.planned import anew_if
from flows.running.refused import in_a_line
from flows.running.session import THREADS
from infra.recipe.schema import Recipe, resolve
from tasks.dume.method import METHOD
from tasks.methods import METHODS
from tasks.planning.made import Aim
from tasks.recipes import validate
from upcycle_core.errors import Fault, raise_faults

AIM = Aim(updated)


@flow(name="dume", task_runner=THREADS)
@in_a_line
def dume(recipe: Recipe, rebuild: bool = False) -> State:
    """Turn the recipe's domains into one Mixture-of-Experts in the MLflow registry.

    Args:
        recipe: What to make.
        rebuild: Make tokenizer, seed, backbone and experts anew where domains came, left or learnt
            since they were made (`flows.grow`, `flows.shrink`, `flows.retrain`).

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    return made("dume", recipe, build, rebuild=rebuild, aim=AIM)


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.method == METHOD.name:
        return []
    remedy = f"is not what flows.dume makes; run {METHODS[recipe.method].flow}"
    return [Fault("method", recipe.method, remedy)]


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on a recipe file."""
    chosen = parser_of("dume").parse_args(arguments)
    recipe = load(chosen)
    raise_faults(_faults(recipe))
    run_flow(
        recipe,
        lambda recipe: dume(recipe, chosen.rebuild),
        begun=anew_if(chosen.rebuild),
        aim=AIM,
    )


if __name__ == "__main__":
    sys.exit(main())
