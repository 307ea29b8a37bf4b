"""What runs are called in lists: the recipe and the day, and in the end what came of them."""

import logging
from collections.abc import Collection
from datetime import date
from typing import Any

from prefect.artifacts import create_link_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run
from prefect.states import Completed, State
from prefect.utilities.urls import url_for

from infra.settings import Settings
from infra.tracking.runs import Run
from tasks.release.versions import OUTCOME_TAG, Outcome
from upcycle_core.evaluation.report.numbers import slug

_logger = logging.getLogger(__name__)


def title_of_day(name: str) -> str:
    """``nightly 2026-11-22``."""
    return f"{name} {date.today().isoformat()}"


def recipe_of(run: FlowRun) -> str | None:
    """Name of the recipe that a run was given; None where it was given none."""
    recipe = run.parameters.get("recipe")
    return recipe.get("name") if isinstance(recipe, dict) else None


def words_of(outcome: Outcome) -> str:
    """``version 7 promoted, 90.55 > 90.52``; shorter where the model was registered before."""
    version = outcome.version
    if not outcome.is_new:
        return f"version {version.number} is this very model"
    said = version.tags.get(OUTCOME_TAG, "registered").replace(":", ",", 1)
    return f"version {version.number} {said}"


def name_run(name: str, *, tags: Collection[str] = ()) -> None:
    """Call Prefect's run so, and give it tags beside those that it began with.

    The work goes on where that cannot be done: the server may be gone for a while.
    """
    run_id = flow_run.id
    if run_id is None:
        return
    try:
        with get_client(sync_client=True) as client:
            kept = sorted({*flow_run.tags, *tags}) if tags else None  # what it has now
            client.update_flow_run(run_id, name=name, tags=kept)
    except Exception as error:  # of any kind, as with bars
        _logger.warning("Prefect does not call the run %s: %s", name, error)


def completed(
    title: str, said: str, result: Any = None, *, run: Run | None = None, name: str = "Completed"
) -> State:
    """The state in which a flow ends, whose run then says what came of it, wherever it is listed.

    Args:
        title: What the run is called so far.
        said: What came of it.
        result: What the flow returns to whoever calls it.
        run: Its run in MLflow, which is called as Prefect's.
        name: The state's.
    """
    called = f"{title}: {said}"
    name_run(called)
    if run is not None:
        run.rename(called)
        run.set_tags({"outcome": said})  # a column of its own: lists cut long names
    return Completed(message=said, data=result, name=name)


def link_runs(settings: Settings, name: str, run: Run) -> str:
    """Let Prefect's run and MLflow's find each other, where servers run or ``make up`` puts them.

    Args:
        settings: Where servers are.
        name: The recipe's.
        run: In MLflow.

    Returns:
        Markdown that links to Prefect's run; empty outside of a flow.
    """
    if flow_run.id is None:
        return ""
    run.set_tags({"prefect.flow_run_id": flow_run.id})
    if settings.mlflow_pages is not None:
        text = "the run, with every stage's curves"
        create_link_artifact(
            key=slug(f"{name}-mlflow-run"),
            link=f"{settings.mlflow_pages}{run.page}",
            link_text=text,
            description=f"In MLflow: {text}.",
        )
    if settings.prefect_pages is None:
        page = url_for("flow-run", obj_id=flow_run.id)
    else:
        page = f"{settings.prefect_pages}/runs/flow-run/{flow_run.id}"
    if page is None:
        return ""
    run.set_tags({"prefect.page": page})
    return f"[Its run in Prefect]({page})"
