"""Say that there is new text: what waits for it starts (the nights that are deployed).

``python -m flows.announce [WHAT]``

WHAT names the text, for people who look at the event later. Other programs send the same event as
they like: ``prefect event emit upcycle.new-data --resource-id upcycle.text``, or Prefect's API.
"""

import asyncio
import sys

from prefect.events import Event, Resource
from prefect.events.clients import get_events_client

from flows.running.arguments import parser_of
from flows.running.command_line import command
from infra.recipe.names import masked
from infra.settings import configure
from upcycle_core.errors import Fault, InputError

NEW_DATA = "upcycle.new-data"
RESOURCE = "upcycle.text"


def announce(what: str = "text") -> None:
    """Send the event to the Prefect server.

    Args:
        what: The new text.

    Raises:
        InputError: There is no server, or it does not answer.
    """
    api = configure().prefect_api_url
    if api is None:
        raise InputError(Fault("server", None, "no Prefect server is running; start it: make up"))
    try:
        asyncio.run(_send(what))
    except OSError as error:
        remedy = f"does not answer ({error}); see what runs: make status"
        raise InputError(Fault("server", masked(api), remedy)) from error


async def _send(what: str) -> None:
    resource = Resource({"prefect.resource.id": RESOURCE, "prefect.resource.name": what})
    async with get_events_client(reconnection_attempts=2) as client:
        await client.emit(Event(event=NEW_DATA, resource=resource))


@command
def main(arguments: list[str] | None = None) -> None:
    """Send the event."""
    announce(parser_of("announce").parse_args(arguments).what)
    print(f"Sent {NEW_DATA}: what waits for it starts within seconds.")


if __name__ == "__main__":
    sys.exit(main())
