"""Symphony-MoE end to end: models that share no seed in, a registered stock-format MoE out.

``python -m flows.symphony RECIPE [ROWS ...] [--set dotted.key=value ...] [--rebuild]``

The first file is a recipe with a ``symphony`` section. The others hold ``baselines:``, rows of the
ablation table that are joined, trained and judged beside it, or ``tasks:``.
"""

import sys

from prefect import flow
from prefect.states import State

from flows.making.building import made
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.planned import anew_if
from flows.running.refused import in_a_line
from flows.running.session import THREADS
from infra.recipe.schema import Recipe, resolve
from tasks.recipes import validate
from tasks.symphony.method import METHOD
from upcycle_core.errors import Fault, raise_faults


@flow(name="symphony", task_runner=THREADS)
@in_a_line
def symphony(recipe: Recipe, rebuild: bool = False) -> State:
    """Join models of different origin into one Mixture-of-Experts in the MLflow registry.

    Args:
        recipe: What to make; ``baselines`` are further rows of its ablation table.
        rebuild: Make anew what later models were built upon: vocabulary, anchor, continued models.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    return made("symphony", recipe, rebuild=rebuild)


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.method == METHOD.name:
        return []
    remedy = "says how models of different origin are joined; add it, or run flows.dume"
    return [Fault("symphony", None, remedy)]


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on recipe files."""
    chosen = parser_of("symphony").parse_args(arguments)
    recipe = load(chosen)
    raise_faults(_faults(recipe))
    run_flow(recipe, lambda recipe: symphony(recipe, chosen.rebuild), begun=anew_if(chosen.rebuild))


if __name__ == "__main__":
    sys.exit(main())
