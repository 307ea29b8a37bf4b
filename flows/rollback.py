"""Make the champion before the champion the champion again, in one command.

``python -m flows.rollback NAME [--because REASON]``

NAME is the registered model. No file changes: whoever loads ``models:/NAME@champion`` gets the
earlier version from now on. Done again, it goes one further back.
"""

import sys
from datetime import UTC, datetime

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
from tasks.release.history import champions, roll_back
from upcycle_core.evaluation.report.numbers import slug


@flow(name="rollback")
@in_a_line
def rollback(name: str, because: str = "") -> State:
    """Let the champion alias of a registered model point at the champion before.

    Args:
        name: The registered model.
        because: Why, for those who look at the version later.

    Returns:
        The version that is champion now, ``models:/NAME/NUMBER``.
    """
    settings = configure()
    live(settings.home)
    close_rollbacks(settings.home, name)
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    reason = f"{when}: {because or 'no reason given'}"
    left, champion = roll_back(Registry(settings), name, reason)
    create_markdown_artifact(
        key=slug(f"{name}-rollback"),
        markdown=f"`{left.reference}` is champion no more, `{champion.reference}` is.\n\n{because}",
        description="Which version was taken back, and why.",
    )
    said = f"version {champion.number} is champion again, {left.number} is no more"
    return completed(title_of_day(f"rollback of {name}"), said, champion.reference)


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    chosen = parser_of("rollback").parse_args(arguments)
    settings = configure()
    # Said before Prefect records a run that cannot begin.
    left, _ = champions(Registry(settings), chosen.name)
    reach_server(settings)
    print(f"champion: {rollback(chosen.name, chosen.because)}")
    print(f"{left.reference} is champion no more; a workspace that holds it keeps its files")


if __name__ == "__main__":
    sys.exit(main())
