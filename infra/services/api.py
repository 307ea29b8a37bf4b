"""The Prefect server as commands ask it, and texts with places to fill."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from infra.recipe.names import masked
from infra.settings import Settings
from upcycle_core.errors import Fault, InputError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


class DeploymentError(RuntimeError):
    """Prefect refused; the message is what it said."""


def server_of(settings: Settings) -> str:
    """Return the address of the server's API.

    Raises:
        InputError: There is no server.
    """
    if settings.prefect_api_url is None:
        raise InputError(Fault("server", None, "no Prefect server is running; start it: make up"))
    return settings.prefect_api_url


@contextmanager
def asked(api: str) -> Iterator["SyncPrefectClient"]:
    """A client of the server, whose refusals are told in one line."""
    # These take a second, which `make up` and the others do without.
    from httpx import HTTPError
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.exceptions import PrefectException

    try:
        with SyncPrefectClient(api) as client:
            yield client
    except (HTTPError, PrefectException) as error:
        message = (
            f"the server at {masked(api)} did not do as it was asked ({error}); do it once more"
        )
        raise DeploymentError(message) from error


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """Plain values whose texts have names in the place of ``{name}``, ``{home}`` and the like."""

    def fill(text: str) -> str:
        for placeholder, name in names.items():
            text = text.replace(placeholder, name)
        return text

    return changed(value, fill)


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """Plain values, with every text in them as ``change`` has it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: changed(entry, change) for key, entry in value.items()}
    return [changed(entry, change) for entry in value] if isinstance(value, list) else value
