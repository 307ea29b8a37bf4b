"""The server itself: one port, one follower, until a signal comes."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable

import uvicorn

from infra.services.ports import HOST
from infra.serving.follower import Follower
from infra.serving.front import Naming, application
from upcycle_core.errors import Fault, InputError

BACKLOG = 1024
GOODBYE_SECONDS = 1
"""What is being answered when a signal comes may go on for so long."""


def listen(port: int) -> socket.socket:
    """Take ``port`` of loopback, or any that is free for 0.

    Raises:
        InputError: It is in use, or no port.
    """
    listening = socket.socket()
    # What a closed server leaves behind is no hindrance.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        remedy = f"cannot be had ({error}); stop the program that uses it, or choose another port "
        raise InputError(Fault("--port", port, remedy + "(0: any that is free)")) from error
    return listening


def serve(make: Callable[[], Follower], naming: Naming, listening: socket.socket) -> None:
    """Answer until a signal comes; then stop all that was started.

    Args:
        make: Makes the follower, inside the event loop.
        naming: What is served.
        listening: The port. Who knocks before the first engine is up, waits.

    Raises:
        InputError: The version cannot be served.
        EngineError: The first engine does not come up.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("upcycle.serving")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    log.propagate = False  # Prefect, where it is imported, says every line once more
    asyncio.run(_serve(make, naming, listening))


async def _serve(make: Callable[[], Follower], naming: Naming, listening: socket.socket) -> None:
    follower = make()
    config = uvicorn.Config(
        application(follower, naming),
        log_level="critical",  # that a client left or an answer was cut is told elsewhere
        lifespan="off",
        timeout_graceful_shutdown=GOODBYE_SECONDS,
        server_header=False,
    )
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    follower.on_break = end
    try:
        await follower.begin()
        host, port = listening.getsockname()
        print(f"{naming.name}@{naming.alias} answers at http://{host}:{port}", flush=True)
        await server.serve(sockets=[listening])
    finally:
        await follower.end()
