"""The Prefect server that a flow brings along."""

from threading import Thread

from infra.services.stopping import out_of_reach
from upcycle_core.errors import Fault, InputError

LOOK_SECONDS = 0.1
PORT_TAKEN = 3
"""Of uvicorn; Prefect tries another port."""


def start_server() -> None:
    """Start what Prefect would start for a flow, but out of reach of Ctrl-C.

    Prefect waits as long for one that has ended as for one that is slow.

    Raises:
        InputError: It ended before it answered, or does not answer for as long as is allowed.
    """
    from prefect.server.api.server import SubprocessASGIServer  # all of the server's code

    server = SubprocessASGIServer()
    failed: list[Exception] = []

    def start() -> None:
        try:
            server.start()
        except Exception as error:  # of one that is given up as well
            failed.append(error)

    with out_of_reach():  # a thread's children inherit it
        starting = Thread(target=start, name="prefect server", daemon=True)
        starting.start()
        while starting.is_alive():
            starting.join(LOOK_SECONDS)
            process = server.server_process
            code = None if process is None else process.poll()
            if code not in (None, PORT_TAKEN):
                remedy = f"the Prefect server that the flow brings along ended ({code}) before it "
                remedy += "answered; run the same command again"
                raise InputError(Fault("server", server.address, remedy))
    if failed:
        remedy = f"the Prefect server that the flow brings along does not answer: {failed[0]}"
        raise InputError(Fault("server", server.address, f"{remedy}; run the same command again"))
