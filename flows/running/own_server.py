"""The Prefect server that a flow brings along: started, and started again if it is lost.

It ends with the process; one that a killed flow leaves is ended by the next flow.
"""

import atexit
import logging
import signal
import time
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, NoReturn

from infra.services.stopping import out_of_reach
from upcycle_core.errors import Fault, InputError

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

LOG = logging.getLogger("prefect")
LOOK_SECONDS = 0.1
WATCH_SECONDS = 0.5
PAUSE_SECONDS = 1.0
TRIES = 3
LIVED_SECONDS = 15.0
"""One that lives as long has started; it is no fault of its own if it ends."""
ASKED_TO = (0, -signal.SIGTERM)
NOT_BEGUN = 3
"""Of uvicorn: its port is taken, or the application did not come up."""


def start_server() -> None:
    """Start what Prefect would start for a flow, but out of reach of Ctrl-C, and keep it there.

    Prefect waits as long for one that has ended as for one that is slow. Where one is lost later,
    Prefect's client asks again for a minute, and then fails; another one, with the same database
    at the same port, answers within seconds.

    Raises:
        InputError: It ended before it answered, or does not answer for as long as is allowed.
    """
    from prefect.server.api.server import SubprocessASGIServer  # all of the server's code

    server = SubprocessASGIServer()
    if server.running:  # one for all flows of a process
        return
    failed: list[Exception] = []

    def start() -> None:
        try:
            server.start()
        except Exception as error:  # of one that is given up as well
            failed.append(error)

    with out_of_reach():  # a thread's children inherit it
        starting = Thread(target=start, name="prefect server", daemon=True)
        starting.start()
        try:
            _wait_for(starting, server)
        except BaseException:  # Ctrl-C as well: it may come before there is a process
            while starting.is_alive() and server.server_process is None:
                starting.join(LOOK_SECONDS)
            server._run_uvicorn_command = _refuse  # type: ignore[method-assign]  # its loop has no end
            server.stop()
            raise
        if not failed:
            _keep(server)
    if failed:
        remedy = f"the Prefect server that the flow brings along does not answer: {failed[0]}"
        raise InputError(Fault("server", server.address, f"{remedy}; run the same command again"))


def _refuse() -> NoReturn:
    """In the place of what starts a server, of one that is given up."""
    raise RuntimeError("the server is given up")


def _wait_for(starting: Thread, server: "SubprocessASGIServer") -> None:
    """Wait until the server answers, or is given up.

    Where a port is taken, or the server cannot begin, Prefect starts another one, for ever.

    Raises:
        InputError: It has ended.
    """
    tried: set[int] = set()
    while starting.is_alive():
        starting.join(LOOK_SECONDS)
        process, code = server.server_process, _ended(server)
        if process is not None:
            tried.add(process.pid)
        if code not in (None, NOT_BEGUN) or len(tried) > TRIES:
            how = f"cannot start ({TRIES} tries)" if len(tried) > TRIES else f"ended ({code})"
            remedy = f"the Prefect server that the flow brings along {how} before it answered; "
            remedy += "run the same command again"
            raise InputError(Fault("server", server.address, remedy))


def _ended(server: "SubprocessASGIServer") -> int | None:
    """With what code its process has ended; None while it runs."""
    process = server.server_process
    return None if process is None else process.poll()


def _keep(server: "SubprocessASGIServer") -> None:
    """Watch it in a thread until Python ends, which is when Prefect stops it."""
    over = Event()

    def watch() -> None:
        tries, began = TRIES, time.monotonic()
        while True:
            while (code := _ended(server)) is None:
                if over.wait(WATCH_SECONDS):
                    return
            tries = TRIES if time.monotonic() - began > LIVED_SECONDS else tries - 1
            # A pause, since whoever ends all that this process has started ends it, too.
            if code in ASKED_TO or tries < 0 or over.wait(PAUSE_SECONDS):
                return
            LOG.warning("the server on %s ended (%s); started again", server.address, code)
            began = time.monotonic()
            with suppress(OSError):  # no memory: tried again
                # Not start(), which waits, and lets others start one meanwhile.
                server.server_process = server._run_uvicorn_command()

    watching = Thread(target=watch, name="keep prefect server", daemon=True)
    watching.start()

    def leave() -> None:
        over.set()
        watching.join()

    atexit.register(leave)  # called before Prefect's own, which was registered before
