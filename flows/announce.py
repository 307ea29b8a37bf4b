"""Say that there is new text: what waits for it starts (the nights that are deployed).

``python -m flows.announce [WHAT]``

WHAT names the text, for people who look at the event later. Other programs send the same event as
they like: ``prefect event emit upcycle.new-data --resource-id upcycle.text``, or Prefect's API.
"""

import asyncio
import sys
from fnmatch import fnmatchcase
from typing import Any

from httpx import HTTPStatusError
from prefect.client.orchestration import get_client
from prefect.events import Event, Resource
from prefect.events.clients import get_events_client
from prefect.exceptions import PrefectException

from flows.running.arguments import parser_of
from flows.running.command_line import command
from infra.recipe.names import masked
from infra.settings import configure
from upcycle_core.errors import Fault, InputError

NEW_DATA = "upcycle.new-data"
RESOURCE = "upcycle.text"
IDLE = "nothing waits for it: no night is deployed, or all are paused; make deploy RECIPE=my.yaml"


def announce(what: str = "text") -> bool:
    """Send the event to the Prefect server.

    Args:
        what: The new text.

    Returns:
        Whether anything waits for it.

    Raises:
        InputError: There is no server, or it does not answer.
    """
    api = configure().prefect_api_url
    if api is None:
        raise InputError(Fault("server", None, "no Prefect server is running; start it: make up"))
    try:
        return asyncio.run(_send(what))
    except OSError as error:
        remedy = f"does not answer ({error}); see what runs: make status"
        raise InputError(Fault("server", masked(api), remedy)) from error


async def _send(what: str) -> bool:
    resource = Resource({"prefect.resource.id": RESOURCE, "prefect.resource.name": what})
    async with get_events_client(reconnection_attempts=2) as client:
        await client.emit(Event(event=NEW_DATA, resource=resource))
    try:
        return await _is_awaited()
    except (HTTPStatusError, PrefectException):  # it takes events, and shows no automations
        return True


async def _is_awaited() -> bool:
    """Whether an automation of the server, as each deployed night has one, waits for the event."""
    count = 0
    async with get_client() as client:
        while found := await client.read_automations(offset=count):
            if any(automation.enabled and _expects(automation.trigger) for automation in found):
                return True
            count += len(found)
    return False


def _expects(trigger: Any) -> bool:
    """Whether the event is one of those that a trigger, or one that it is made of, looks for."""
    if parts := getattr(trigger, "triggers", None):
        return any(_expects(part) for part in parts)
    expected = getattr(trigger, "expect", None)  # a metric's has none, and an empty one is for all
    return expected == set() or any(fnmatchcase(NEW_DATA, pattern) for pattern in expected or ())


@command
def main(arguments: list[str] | None = None) -> None:
    """Send the event."""
    if announce(parser_of("announce").parse_args(arguments).what):
        print(f"Sent {NEW_DATA}: what waits for it starts within seconds.")
    else:
        print(f"Sent {NEW_DATA}, and {IDLE}")


if __name__ == "__main__":
    sys.exit(main())
