"""Symphony-MoE end to end: models that share no seed in, a registered stock-format MoE out.

``python -m flows.symphony RECIPE [ROWS ...] [--set dotted.key=value ...]``

The first file is a recipe with a ``symphony`` section. The others hold ``baselines:``, rows of the
ablation table that are joined, trained and judged beside it, or ``tasks:``.
"""

import argparse
import sys
from pathlib import Path

from prefect import flow

from flows.artifacts import SUMMARY
from flows.building import publish
from flows.session import THREADS, open_session
from infra import settings as environment
from infra.reading import load_recipe, validate
from infra.recipe import SYMPHONY, Recipe, resolve
from tasks import pipeline
from tasks.sources import check
from tasks.workspace import Workspace
from upcycle_core.errors import Fault, InputError, raise_faults


@flow(name="symphony", task_runner=THREADS)
def symphony(recipe: Recipe) -> str:
    """Join models of different origin into one Mixture-of-Experts in the MLflow registry.

    Args:
        recipe: What to make; ``baselines`` are further rows of its ablation table.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    with open_session("symphony", recipe) as session:
        for stage in pipeline.ORDER:
            session.ensure(stage)
        session.finish()
        outcome = publish(session, recipe.scored_models)
    return outcome.version.reference


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.method == SYMPHONY:
        return []
    remedy = "says how models of different origin are joined; add it, or run flows.dume"
    return [Fault("symphony", None, remedy)]


def main(arguments: list[str] | None = None) -> int:
    """Run the flow on recipe files; bad input ends with exit code 2 and every fault named."""
    parser = argparse.ArgumentParser(prog="python -m flows.symphony", description=__doc__)
    parser.add_argument("recipe", type=Path, nargs="+", help="YAML files; the first is the recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args(arguments)
    home = environment.configure().home
    try:
        recipe = load_recipe(chosen.recipe[0], chosen.set, added=chosen.recipe[1:])
        raise_faults(_faults(recipe))
        check(recipe, home / "models")
        workspace = home / recipe.name
        with Workspace(workspace).lock("the start of a flow"):
            pass  # said here in one line, before Prefect records a run that cannot begin
        symphony(recipe)
        print((workspace / SUMMARY).read_text())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
