"""The page on tasks: in the workspace, in MLflow, in Prefect, and linked from the version."""

import shutil

from prefect.artifacts import create_link_artifact

from flows.pages.model import log_report, publish_pictures, publish_table
from flows.running.session import FlowSession
from infra.tracking.records import Version
from upcycle_core.evaluation.report.files import MARKDOWN, PAGE
from upcycle_core.evaluation.report.numbers import slug
from upcycle_core.evaluation.tasks import results
from upcycle_core.evaluation.tasks.report import score_table, write_task_report
from upcycle_core.evaluation.tasks.results import TaskEvaluation

FOLDER = "evaluated"
"""In the workspace: the page, and every item of every model."""
PAGE_TAG = "upcycle.tasks"
"""Of a version: the run whose files hold the page."""
HEADING = "\n# Task evaluation\n"


def publish_tasks(session: FlowSession, version: Version, tasks: TaskEvaluation) -> None:
    """Write the page of an evaluated version and show it wherever people look."""
    folder = session.workspace.path(FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    write_task_report(tasks, folder, model=session.recipe.name)
    run, registry, name = session.run, session.registry, session.recipe.name
    log_report(session, folder, FOLDER, version)
    means = {
        row: {task: score.mean for task, score in own.items()} for row, own in tasks.scores.items()
    }
    run.log_metrics(
        {
            f"task.{task}/{row}": mean
            for row, own in means.items()
            for task, mean in own.items()
            if row != tasks.subject
        }
    )
    own = {f"task.{task}/{tasks.subject}": mean for task, mean in means[tasks.subject].items()}
    registry.add_metrics(version, own, run=run)
    registry.set_tags(version, {PAGE_TAG: run.id})
    page = run.file_page(f"{FOLDER}/{PAGE}")
    text = (folder / MARKDOWN).read_text()
    link = f"[Page with plots, intervals and items](#{page.partition('#')[2]})"
    with registry.alone(version.name):
        known = registry.description(version).split(HEADING)[0]
        registry.describe(version, f"{known.rstrip()}\n{HEADING}\n{link}\n\n{text}")
    scores = score_table(results.metrics(tasks))
    publish_table(f"{name}-tasks", scores, "Scores on tasks, every model.")
    publish_pictures(f"{name}-tasks", [folder / "scores.png"])
    if session.settings.mlflow_pages is not None:
        create_link_artifact(
            key=slug(f"{name}-tasks-page"),
            link=f"{session.settings.mlflow_pages}{page}",
            link_text=f"scores of {version.reference} on tasks, in MLflow",
        )
