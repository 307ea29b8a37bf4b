"""Make the champion before the champion the champion again, in one command.

``python -m flows.rollback NAME [VERSION] [--because REASON]``

NAME is the registered model. No file changes: whoever loads ``models:/NAME@champion`` gets the
earlier version from now on. Done again, it goes one further back; with the number of the VERSION
that is taken back it may be done again, and no other follows it.
"""

import logging
import sys
from datetime import UTC, datetime

import httpx
from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from flows.running.arguments import parser_of
from flows.running.command_line import command, reach_server
from flows.running.interrupted import close_rollbacks
from flows.running.naming import completed, title_of_day
from flows.running.refused import in_a_line
from flows.running.turn import live
from infra.settings import configure
from infra.tracking.registry import Registry
from tasks.release.history import champions, roll_back, taken_back
from upcycle_core.evaluation.report.numbers import slug

_logger = logging.getLogger(__name__)


@flow(name="rollback")
@in_a_line
def rollback(name: str, because: str = "", version: int | None = None) -> State:
    """Let the champion alias of a registered model point at the champion before.

    Args:
        name: The registered model.
        because: Why, for those who look at the version later.
        version: The number of the version to take back, and no other if that was done before; by
            default, whichever is champion when the run starts.

    Returns:
        The version that is champion now, ``models:/NAME/NUMBER``.
    """
    settings = configure()
    live(settings.home)
    close_rollbacks(settings.home, name)
    registry = Registry(settings)
    number = registry.pointed(name, "champion") if version is None else version
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    reason = f"{when}: {because or 'no reason given'}"
    left, champion = roll_back(registry, name, reason, only=number)
    said = f"version {champion.number} is champion again, {left.number} is no more"
    if "champion" not in left.aliases:
        said = f"version {left.number} was taken back before; version {champion.number} is champion"
    _show(name, f"`{left.reference}` is champion no more, `{champion.reference}` is.\n\n{because}")
    return completed(title_of_day(f"rollback of {name}"), said, champion.reference)


def _show(name: str, markdown: str) -> None:
    """Keep a page of it in Prefect. The alias has moved, whether that can be shown or not."""
    about = "Which version was taken back, and why."
    try:
        create_markdown_artifact(key=slug(f"{name}-rollback"), markdown=markdown, description=about)
    except Exception as error:  # of any kind, as with bars
        _logger.warning("Prefect keeps no page of the rollback of %s: %s", name, error)


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow, for the version that is champion now if none is named."""
    chosen = parser_of("rollback").parse_args(arguments)
    settings = configure()
    registry = Registry(settings)
    # Said before Prefect records a run that cannot begin.
    done = taken_back(registry, chosen.name, chosen.version)
    left, _ = done or champions(registry, chosen.name)
    number = left.number if chosen.version is None else chosen.version
    reach_server(settings)
    try:
        champion = f"{rollback(chosen.name, chosen.because, number)}"
    except (httpx.TransportError, RuntimeError) as error:  # Prefect's server is lost
        done = taken_back(registry, chosen.name, number)
        if done is None:
            raise
        champion = done[1].reference
        _logger.warning("Prefect does not know how this rollback has ended: %s", error)
    print(f"champion: {champion}")
    print(f"{left.reference} is champion no more; a workspace that holds it keeps its files")


if __name__ == "__main__":
    sys.exit(main())
