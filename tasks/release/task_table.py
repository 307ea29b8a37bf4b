"""Every model's scores on tasks, put together: the table that a page and the gate are made from."""

from collections.abc import Mapping, Sequence

from infra.recipe.schema import Recipe
from tasks.dume.task_routing import RoutingScores, read_routing_scores, routing_asked
from tasks.engine.stage import Session
from tasks.release.champion import CHAMPION, Champion
from tasks.scoring.task_scores import read_scores
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.results import TaskEvaluation
from upcycle_core.evaluation.tasks.score import TaskScore
from upcycle_core.evaluation.text.results import title_of

RIVALS = (CHAMPION, "model_averaging", "seed")
"""What the merged model is compared with item by item, where they were scored."""


def task_table(
    session: Session, champion: Champion | None, *, models: Sequence[str]
) -> TaskEvaluation | None:
    """The scores that lie in the workspace, the champion's beside them.

    Args:
        session: The recipe at work.
        champion: Is scored now, if it is another model than the workspace's.
        models: Rows whose stage of task scores is up to date.

    Returns:
        The table; None if the recipe has no tasks or the merged model was not scored.
    """
    recipe, workspace = session.recipe, session.workspace
    if not recipe.tasks or recipe.method not in models:
        return None
    scores: dict[str, Mapping[str, TaskScore]] = {}
    items: dict[str, list[Item]] = {}
    for row in models:
        scores[row], items[row] = read_scores(workspace.path(f"task_scores/{row}"))
    routing = RoutingScores()
    if routing_asked(recipe):
        routing = read_routing_scores(workspace.path("task_routing"))
    scores |= routing.rows
    titles = {row: _title(recipe, row) for row in scores}
    if champion is not None and not champion.is_own:
        scores[CHAMPION], items[CHAMPION] = champion.tasks()
        titles[CHAMPION] = f"Champion, version {champion.version.number}"
    return TaskEvaluation(
        tasks=tuple(recipe.tasks),
        titles=titles,
        scores=scores,
        domains={name: task.domain for name, task in recipe.tasks.items() if task.domain},
        items=items,
        subject=recipe.method,
        rivals=tuple(row for row in RIVALS if row in scores),
        sweeps=routing.sweeps,
    )


def _title(recipe: Recipe, row: str) -> str:
    baseline = recipe.baselines.get(row)
    return (baseline.title or row) if baseline else title_of(row, recipe.domains)
