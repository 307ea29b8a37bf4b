"""Score the models of a recipe on tasks: experts, average, merged model, champion.

``python -m flows.evaluate RECIPE [TASKS ...] [--set dotted.key=value ...]``

The first file is the recipe of ``flows.dume``; what it has made is used again, what is missing is
made. The others hold ``tasks:`` (or ``baselines:``, whose models are then scored as well).
"""

import sys

from prefect import flow

from flows.making.building import made
from flows.pages.tasks import FOLDER
from flows.running.command_line import command, free_workspace, load, rows_parser
from flows.running.session import THREADS
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.data.sources import check
from tasks.recipes import validate
from upcycle_core.errors import Fault, raise_faults


@flow(name="evaluate", task_runner=THREADS)
def evaluate(recipe: Recipe) -> str:
    """Score every model of the recipe on its tasks, and show the page.

    Args:
        recipe: What to score; ``tasks`` says on what.

    Returns:
        The registered version that the page is about, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    return made("evaluate", recipe)


def _faults(recipe: Recipe) -> list[Fault]:
    if not recipe.tasks:
        remedy = "nothing to score on; add a file with tasks, e.g. recipes/tasks.yaml"
        return [Fault("tasks", {}, remedy)]
    if recipe.method not in recipe.scored_models:
        remedy = f"the page is about the merged model; add {recipe.method}"
        return [Fault("task_evaluation.models", list(recipe.scored_models), remedy)]
    return []


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation."""
    recipe = load(rows_parser("flows.evaluate", __doc__).parse_args(arguments))
    raise_faults(_faults(recipe))
    check(recipe, environment.configure().home / "models")
    workspace = free_workspace(recipe).root
    reference = evaluate(recipe)
    print(f"""
{(workspace / FOLDER / "table.txt").read_text().rstrip()}

Page      {workspace / FOLDER / "report.html"}
Items     {workspace / FOLDER / "items.parquet"}
Registry  {reference}
""")


if __name__ == "__main__":
    sys.exit(main())
