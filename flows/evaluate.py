"""Score the models of a recipe on tasks: experts, average, merged model, champion.

``python -m flows.evaluate RECIPE [TASKS ...] [--set dotted.key=value ...]``

The first file is the recipe of ``flows.dume``, ``flows.symphony`` or ``flows.simoe``; what it has
made is used again, what is missing is made. The others hold ``tasks:`` and ``task_evaluation:`` (or
``baselines:``, whose models are then scored as well).
"""

import sys

from prefect import flow
from prefect.states import State

from flows.making.building import made
from flows.making.builds import whole
from flows.pages.tasks import FOLDER
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.refused import in_a_line
from flows.running.session import THREADS
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.methods import scored_models
from tasks.recipes import validate
from upcycle_core.errors import Fault, raise_faults


@flow(name="evaluate", task_runner=THREADS)
@in_a_line
def evaluate(recipe: Recipe) -> State:
    """Score every model of the recipe on its tasks, and show the page.

    Args:
        recipe: What to score; ``tasks`` says on what.

    Returns:
        The registered version that the page is about, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    return made("evaluate", recipe, whole(recipe))


def _faults(recipe: Recipe) -> list[Fault]:
    if not recipe.tasks:
        remedy = "nothing to score on; add a file with tasks, e.g. recipes/tasks.yaml"
        return [Fault("tasks", {}, remedy)]
    scored = list(scored_models(recipe))
    if recipe.method not in scored:
        remedy = f"the page is about the merged model; add {recipe.method}"
        return [Fault("task_evaluation.models", scored, remedy)]
    return []


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation."""
    recipe = load(parser_of("evaluate").parse_args(arguments))
    raise_faults(_faults(recipe))
    reference = run_flow(recipe, evaluate, shown=None)
    page = environment.configure().home / recipe.name / FOLDER
    print(f"""
{(page / "table.txt").read_text().rstrip()}

Page      {page / "report.html"}
Items     {page / "items.parquet"}
Registry  {reference}
""")


if __name__ == "__main__":
    sys.exit(main())
