"""MLflow's server without what models need none of: ``python -m infra.tracking.asgi server ...``.

MLflow also answers for an assistant, which runs a coding agent and its shell as the user who
started the server, for whoever reaches its port on this machine; for a gateway, which spends the
keys of model vendors; for jobs; and for a register of other programs' tools. It has no switch for
them, so their addresses are closed before it hears of them.

With ``--logs FOLDER`` before ``server`` it cuts the logs there as they grow: its own, and those of
what ``make up`` runs beside it.
"""

import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from infra.logs import bound_logs
from infra.tracking.private import run_server, whole_server

CLOSED = re.compile(
    r"/gateway(/|$)"
    r"|/(ajax-)?api/\d+\.\d+/(mlflow/)?"
    r"(assistant|gateway|gateway-proxy|jobs|mcp-servers|prompt-optimization)(/|$)"
)
"""Beginnings of the paths that are answered by nobody."""
ANSWER = b"This server answers for runs and models alone.\n"
Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Callable[[Scope], Awaitable[None]]], Awaitable[None]]


def only_needed(application: Application) -> Application:
    """``application`` without the paths of ``CLOSED``."""

    async def needed(scope: Scope, receive: Any, send: Callable[[Scope], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan" or CLOSED.match(scope["path"]) is None:
            await application(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})

    return needed


def application() -> Application:
    """What uvicorn runs."""
    return only_needed(whole_server())


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--logs"]:
        bound_logs(Path(arguments[1]))
        del arguments[:2]
    run_server(arguments, "infra.tracking.asgi:application")
