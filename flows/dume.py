"""DUME end to end: text or ready experts in, a registered stock-format MoE out.

``python -m flows.dume recipes/demo.yaml [--set dotted.key=value ...] [--rebuild]``
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from prefect import flow

from flows.artifacts import SUMMARY
from flows.building import build
from flows.session import THREADS, open_session
from infra import settings as environment
from infra.reading import load_recipe, validate
from infra.recipe import Recipe, resolve
from tasks.lineage import forget
from tasks.sources import check
from tasks.workspace import Workspace
from upcycle_core.errors import InputError


@flow(name="dume", task_runner=THREADS)
def dume(recipe: Recipe, rebuild: bool = False) -> str:
    """Turn the recipe's domains into one Mixture-of-Experts in the MLflow registry.

    Args:
        recipe: What to make.
        rebuild: Make tokenizer, seed, backbone and experts anew where domains came, left or learnt
            since they were made (`flows.grow`, `flows.shrink`, `flows.retrain`).

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    with open_session("dume", recipe) as session:
        if rebuild:
            forget(session.workspace)
            session.adopt(replace(session.recipe, lineage=None))
        outcome = build(session)
    return outcome.version.reference


def main(arguments: list[str] | None = None) -> int:
    """Run the flow on a recipe file; bad input ends with exit code 2 and every fault named."""
    parser = argparse.ArgumentParser(prog="python -m flows.dume", description=__doc__)
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value"
    )
    parser.add_argument("--rebuild", action="store_true", help="what was built upon, too")
    chosen = parser.parse_args(arguments)
    settings = environment.configure()
    try:
        recipe = load_recipe(chosen.recipe, chosen.set)
        check(recipe, settings.home / "models")
        with Workspace(settings.home / recipe.name).lock("the start of a flow"):
            pass  # said here in one line, before Prefect records a run that cannot begin
        dume(recipe, chosen.rebuild)
        print((settings.home / recipe.name / SUMMARY).read_text())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
