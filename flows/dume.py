"""DUME end to end: text or ready experts in, a registered stock-format MoE out.

``python -m flows.dume recipes/demo.yaml [--set dotted.key=value ...] [--rebuild]``
"""

import sys
from dataclasses import replace

from prefect import flow

from flows.pages.model import SUMMARY
from flows.running.building import build
from flows.running.command_line import command, free_workspace, load, recipe_parser
from flows.running.session import THREADS, open_session
from infra import settings as environment
from infra.recipe.reading import validate
from infra.recipe.schema import Recipe, resolve
from tasks.data.sources import check
from tasks.living.lineage import forget


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


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on a recipe file."""
    parser = recipe_parser("flows.dume", __doc__)
    parser.add_argument("--rebuild", action="store_true", help="what was built upon, too")
    chosen = parser.parse_args(arguments)
    recipe = load(chosen)
    check(recipe, environment.configure().home / "models")
    workspace = free_workspace(recipe).root
    dume(recipe, chosen.rebuild)
    print((workspace / SUMMARY).read_text())


if __name__ == "__main__":
    sys.exit(main())
