"""Flow runs that were killed: Prefect takes them for running until the next one says otherwise."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.runtime import flow_run
from prefect.states import Crashed, State

from flows.running.naming import recipe_of
from flows.running.turn import WHERE, identity, is_alive
from tasks.engine.workspace import Workspace

BEGIN_SECONDS = 5.0
"""From Prefect's beginning of a run to ours."""


def close_interrupted(workspace: Workspace, *models: str) -> None:
    """Mark earlier runs on a workspace, and rollbacks of its models, that were killed.

    Args:
        workspace: The workspace, below its home.
        models: The registered models.
    """
    home, name = workspace.root.parent, workspace.root.name
    _close(home, name, is_of=lambda run: holds(run, workspace))
    close_rollbacks(home, *models)


def close_rollbacks(home: Path, *models: str) -> None:
    """Mark earlier rollbacks of registered models that were killed.

    They hold no workspace, and say in the home that they live.
    """
    rollbacks = FlowFilter(name=FlowFilterName(any_=["rollback"]))
    _close(home, is_of=lambda run: run.parameters.get("name") in models, flows=rollbacks)


def holds(run: FlowRun, workspace: Workspace) -> bool:
    """Whether a flow run is of those that hold this workspace while they live."""
    recipe, name = recipe_of(run), workspace.root.name
    if recipe is not None:
        return recipe == name
    # A restore is given no recipe, and may go into another home; others with the tag hold nothing.
    return name in run.tags and run.parameters.get("into", "") is None


def _close(
    home: Path,
    name: str = "",
    *,
    is_of: Callable[[FlowRun], bool],
    flows: FlowFilter | None = None,
) -> None:
    """Mark runs that never ended and are dead.

    One that has just begun may not have said yet that it is alive, nor where: the server may be
    that of other homes too, with workspaces of the same name.

    Args:
        home: Where they say that they live, see ``live``.
        name: The same.
        is_of: Whether a run is of those that say it there.
        flows: Whose runs; all by default.
    """
    now = datetime.now(UTC)
    running = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
    )
    here = (None, identity(home))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_filter=flows, flow_run_filter=running):
            if str(run.id) == flow_run.id or not is_of(run):
                continue
            if (run.labels or {}).get(WHERE) not in here:
                continue
            # A clock that was set back has it begin tomorrow.
            if run.start_time and abs((now - run.start_time).total_seconds()) < BEGIN_SECONDS:
                continue
            if not is_alive(home / name, run.id):  # nor has it ended well meanwhile, says Prefect
                state: State[Any] = Crashed(message="killed; closed by the next run")
                client.set_flow_run_state(run.id, state)
