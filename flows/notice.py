"""A notice that a night has failed, through a block of Prefect; again and again if need be.

``python -m flows.notice TYPE/NAME`` sends a trial notice.

TYPE/NAME is a block with somebody's address: ``webhook/on-call``, ``slack-webhook/on-call``,
``mail/on-call``. What `make deploy NOTICE=TYPE/NAME` deploys starts this flow when a night has
failed. It never fails the night, nor holds the worker: what cannot be delivered is tried again
later, by a run of its own, and every try is a run that says why.
"""

import asyncio
import logging
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect import flow
from prefect.blocks.abstract import NotificationError
from prefect.blocks.core import Block
from prefect.blocks.notifications import AppriseNotificationBlock, NotificationBlock
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import deployment
from prefect.settings import PREFECT_UI_URL
from prefect.states import Completed, Failed, Scheduled, State

from flows.running.arguments import parser_of
from flows.running.command_line import command, reach_server
from flows.running.naming import name_run, recipe_of
from flows.running.refused import in_a_line
from infra.recipe.names import masked
from infra.settings import configure
from upcycle_core.errors import Fault, InputError

DELAYS = (10, 60, 600, 3_600, 4 * 3_600, 12 * 3_600)
"""Seconds until the next try: a day in all."""
PATH = re.compile(r"(\w://[^/?#\s]*[/?#])\S*\w")
"""What follows the host of an address: of a webhook it is the secret."""
RUN = "prefect.flow-run."
"""Before the id of a run, in events."""


class Mail(AppriseNotificationBlock):
    """Mail, through any server: ``mailtos://USER:PASSWORD@HOST?from=ADDRESS&to=ADDRESS``."""

    _block_type_name = "Mail"
    _block_type_slug = "mail"


@flow(name="notice")
@in_a_line
def notice(run: str, block: str, attempt: int = 1) -> State:
    """Say that a run has failed, to whom it concerns.

    Args:
        run: The run's id.
        block: Where the notice goes, `TYPE/NAME` of a block.
        attempt: The how-manieth try this is.

    Returns:
        Completed, with what was delivered, or when it is tried again; Failed at the end of a day.
    """
    with get_client(sync_client=True) as client:
        failed = client.read_flow_run(UUID(run.removeprefix(RUN)))
        recipe = recipe_of(failed)
        name_run(f"notice of {failed.name}", tags=() if recipe is None else (recipe,))
        try:
            deliver(block, *wording(failed))
        except Exception as error:  # of any kind: an address may be wrong in many ways
            why = reason(error)
            if deployment.id is None or attempt > len(DELAYS):
                return Failed(name="Not delivered", message=why)
            again = datetime.now(UTC) + timedelta(seconds=DELAYS[attempt - 1])
            client.create_flow_run_from_deployment(
                UUID(str(deployment.id)),
                parameters={"run": run, "block": block, "attempt": attempt + 1},
                state=Scheduled(scheduled_time=again),
            )
            when = again.strftime("%Y-%m-%d %H:%M:%S UTC")
            return Completed(name="Not delivered yet", message=f"{why}; again at {when}")
    return Completed(message=f"delivered to {block}: {failed.name}")


def wording(run: FlowRun) -> tuple[str, str]:
    """Subject and text of the notice of a run."""
    name = recipe_of(run) or run.name
    state = run.state
    subject = f"{name}: the night ended as {state.name if state else 'unknown'}"
    page = f"{PREFECT_UI_URL.value()}/runs/flow-run/{run.id}" if PREFECT_UI_URL.value() else ""
    lines = [f"Run {run.name}", state.message if state else None, page]
    return subject, "\n".join(line for line in lines if line)


def deliver(block: str, subject: str, text: str) -> None:
    """Send a notice.

    Args:
        block: `TYPE/NAME` of a webhook, or of any block that notifies.
        subject: One line.
        text: The rest.

    Raises:
        InputError: There is no such block, or it is of another kind.
        Exception: What its kind raises where it cannot be delivered.
    """
    receiver = load_block(block)
    if isinstance(receiver, Webhook):
        answer = asyncio.run(receiver.call({"subject": subject, "text": f"{subject}\n{text}"}))
        answer.raise_for_status()
        return
    notify: Any = receiver.notify  # an ordinary function where no event loop runs
    # What the error says is what Apprise logs: below a warning that is the address as well.
    logging.getLogger("apprise").setLevel(logging.WARNING)
    with receiver.raise_on_failure():
        notify(text, subject)


def load_block(name: str) -> Webhook | NotificationBlock:
    """The block of this ``TYPE/NAME``.

    Raises:
        InputError: There is none, or it is of a kind that sends nothing.
    """
    try:
        found = Block.load(name)
    except ValueError as error:
        remedy = "is no block TYPE/NAME of this Prefect server; make one: docs/operations.md, "
        raise InputError(Fault("notice", name, f"{remedy}A notice of a failed night")) from error
    if not isinstance(found, Webhook | NotificationBlock):
        remedy = "sends nothing; name a webhook or a block that notifies"
        raise InputError(Fault("notice", name, remedy))
    return found


def reason(error: Exception) -> str:
    """Why it was not delivered, without the address, which may hold a secret."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"the receiver answers {error.response.status_code}"
    said = error.log if isinstance(error, NotificationError) else str(error)
    said = PATH.sub(r"\1***", masked(" ".join(said.split())))
    return f"{type(error).__name__}: {said}"


@command
def main(arguments: list[str] | None = None) -> None:
    """Send a trial notice."""
    block = parser_of("notice").parse_args(arguments).block
    reach_server(configure())
    try:
        deliver(block, "a trial", "This is what a notice looks like.")
    except InputError:
        raise
    except Exception as error:  # of any kind: an address may be wrong in many ways
        raise InputError(Fault("notice", block, f"was not delivered: {reason(error)}")) from error
    print(f"Sent to {block}.")


if __name__ == "__main__":
    sys.exit(main())
