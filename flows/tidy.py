"""Clear up: what is older than the recipe's ``keep`` says goes; what it would free is shown first.

``python -m flows.tidy recipes/demo.yaml [--set dotted.key=value ...] [--apply]``

Without ``--apply`` nothing is changed. What champion and challenger need always stays.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import State

from flows.making.change import unfinished
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, reach_server
from flows.running.naming import completed, recipe_of, title_of_day
from flows.running.refused import in_a_line
from flows.running.turn import log, turn
from infra import settings as environment
from infra.cluster.sessions import left, remove_left
from infra.recipe.schema import Recipe, resolve
from infra.tracking import copies
from infra.tracking.registry import Registry
from infra.tracking.retention import Records
from tasks.engine.workspace import Workspace
from tasks.living.lineage import with_lineage
from tasks.living.retention import Disk, Spare, spares, table
from tasks.planning.row import gigabytes
from tasks.recipes import validate
from tasks.release.versions import compressed_name
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.report.numbers import slug

PAGE = 200
NOTICE = {"run", "block"}
"""Parameters of a notice, which is given no recipe."""


@flow(name="tidy")
@in_a_line
def tidy(recipe: Recipe, apply: bool = False) -> State:
    """Free what is older than the recipe's `keep` says.

    Args:
        recipe: Whose workspace, and what stays.
        apply: Remove what was found; without it, it is only shown.

    Returns:
        A table of what was, or would be, freed.
    """
    recipe = validate(resolve(recipe))
    settings = environment.configure()
    workspace = find_workspace(settings.home / recipe.name)
    with turn(workspace, "the flow tidy", recipe):
        recipe = with_lineage(recipe, workspace)
        records, registry = Records(settings, f"upcycle-{recipe.name}"), Registry(settings)
        change = unfinished(workspace)
        coming = () if change is None else change.coming
        past = spares(recipe, workspace, records, registry, coming=coming)
        found = [*past, *_copies(settings), *_ray_sessions(settings), *_flow_runs(recipe)]
        rows = table(found)
        create_table_artifact(
            key=slug(f"{recipe.name}-tidy"),
            table=rows,
            description="What was freed." if apply else "What would be freed; nothing was changed.",
        )
        for spare in found if apply else ():
            log(f"removing {spare.what}: {spare.why}")
            spare.free()
    size = gigabytes(sum(spare.bytes or 0 for spare in found))
    said = f"{size} {'freed' if apply else 'to be freed'}" if found else "nothing to free"
    return completed(title_of_day(f"tidy of {recipe.name}"), said, shown(rows, apply))


def find_workspace(root: Path) -> Workspace:
    """The workspace at ``root``.

    Raises:
        InputError: There is none.
    """
    if not root.is_dir():
        remedy = "there is no such workspace; check the recipe's name and UPCYCLE_HOME"
        raise InputError(Fault("workspace", str(root), remedy))
    return Workspace(root)


def shown(rows: Sequence[dict[str, Any]], apply: bool) -> str:
    """The table as text, and what to type next."""
    if len(rows) == 1:
        return "Nothing to free.\n"
    columns = list(rows[0])
    width = {c: max(len(c), *(len(str(row[c])) for row in rows)) for c in columns}
    lines = [
        "  ".join(
            f"{value!s:>{width[c]}}" if c in ("count", "bytes") else f"{value!s:<{width[c]}}"
            for c, value in row.items()
        ).rstrip()
        for row in ({c: c for c in columns}, *rows)
    ]
    after = "Freed." if apply else "Nothing was changed. Free it: the same command with --apply"
    return "\n".join([*lines, "", after, ""])


def _copies(settings: environment.Settings) -> Iterator[Spare]:
    """What was fetched of versions for servers and commands that have moved on."""
    if gone := copies.unused(settings):
        why = f"nobody reads them, and {copies.KEPT} versions of the same model were read later"
        size = Disk().freed(file for copy in gone for file in copy.rglob("*") if file.is_file())
        free = partial(copies.remove_unused, settings)
        yield Spare("copies of registered versions", why, len(gone), size, free)


def _ray_sessions(settings: environment.Settings) -> Iterator[Spare]:
    """Folders of Rays whose flows were killed."""
    if gone := [*left(settings.ray_sessions)]:
        why = "their flows were killed, and their processes are gone"
        size = sum(f.lstat().st_size for s in gone for f in s.rglob("*") if f.is_file())
        free = partial(remove_left, settings.ray_sessions)
        yield Spare("folders of Ray", why, len(gone), size, free)


def _flow_runs(recipe: Recipe) -> Iterator[Spare]:
    """Ended flow runs of this workspace beyond the newest, with their artifacts and logs."""
    with get_client(sync_client=True) as client:
        spare = [run for run in _ended(client) if _is_of(run, recipe)][recipe.keep.flow_runs :]

    def free() -> None:
        with get_client(sync_client=True) as client:
            for run in spare:
                _delete(client, run)

    if spare:
        why = f"ended, and {recipe.keep.flow_runs} ended later"
        yield Spare("Prefect flow runs", why, len(spare), None, free)


def _ended(client: SyncPrefectClient) -> Iterator[FlowRun]:
    """Flow runs that have ended, newest first."""
    ended = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(TERMINAL_STATES)))
    )
    offset = 0
    while page := client.read_flow_runs(
        flow_run_filter=ended,
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
        offset=offset,
    ):
        yield from page
        offset += len(page)


def _is_of(run: FlowRun, recipe: Recipe) -> bool:
    """Whether a flow ran on this workspace, or on its registered model."""
    given = recipe_of(run)
    if given is not None:
        return given == recipe.name
    if run.parameters.keys() >= NOTICE:  # a tag alone is anybody's
        return recipe.name in run.tags
    return run.parameters.get("name") in (recipe.registered_name, compressed_name(recipe))


def _delete(client: SyncPrefectClient, run: FlowRun) -> None:
    """Delete a flow run for good: its artifacts first, which nothing would find without it."""
    this = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
    while found := client.read_artifacts(flow_run_filter=this, limit=PAGE):
        for artifact in found:
            client.delete_artifact(artifact.id)
    with suppress(ObjectNotFound):  # somebody was faster
        client.delete_flow_run(run.id)


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on a recipe file."""
    chosen = parser_of("tidy").parse_args(arguments)
    recipe = load(chosen)
    settings = environment.configure()
    with turn(find_workspace(settings.home / recipe.name), "the start of a flow", recipe):
        reach_server(settings)  # said in one line, before Prefect records a run that cannot begin
    print(tidy(recipe, apply=chosen.apply))


if __name__ == "__main__":
    sys.exit(main())
