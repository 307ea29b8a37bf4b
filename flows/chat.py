"""Talk to a registered model in the browser: ``python -m flows.chat NAME@champion``.

The page colours every token by the expert that made it. It is served on loopback alone, to who sits
at this machine.
"""

import argparse
import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flows.running.arguments import parser_of
from flows.running.command_line import command
from flows.running.registered import Registered, load, registered
from infra import settings as environment
from infra.services.ports import HOST
from upcycle_core.errors import Fault, InputError


@command
def main(arguments: list[str] | None = None) -> None:
    """Serve the page until Ctrl-C."""
    chosen = parser_of("chat").parse_args(arguments)
    with listening(chosen.port) as listener:
        settings = environment.configure()
        found = registered(chosen.model, settings)
        documents = settings.home / str(found.recipe.get("name", "")) / "documents"
        print(f"Loading {found.version.name}, version {found.version.number}", flush=True)
        serve(found, chosen, listener, documents)


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A socket at ``port`` of loopback, before anything is loaded.

    Raises:
        InputError: It is no port, or in use.
    """
    if not 0 < port < 65536:
        raise InputError(Fault("port", port, "not a port; give a number from 1 to 65535"))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen()
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = "is in use" if taken else f"cannot be opened ({error.strerror})"
            raise InputError(Fault("port", port, f"{remedy}; choose another: --port")) from error
        yield listener


def serve(
    found: Registered, chosen: argparse.Namespace, listener: socket.socket, documents: Path
) -> None:
    """Load the model and serve its page until a signal comes.

    Raises:
        InputError: The model writes no text by itself, or its files do not belong together.
    """
    import uvicorn

    from flows.talking.app import make_app
    from flows.talking.prompts import example_prompts
    from flows.talking.speaker import Speaker, expert_names
    from upcycle_core.moe.trace import Routing

    class Server(uvicorn.Server):
        """One that waits for no answer when a signal comes, and then hands the signal on."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            super().handle_exit(sig, frame)
            self.force_exit = True

    model, tokenizer = load(found.directory, chosen)
    domains = [*found.recipe.get("domains", {})]
    speaker = Speaker(
        model,
        tokenizer,
        name=f"{found.version.name}, version {found.version.number}",
        bos=found.bos,
        names=expert_names(Routing.of(model), found.experts),
        prompts=example_prompts(domains, documents),
    )
    app = make_app(speaker, chosen.port)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False)
    print(f"Talk to it at http://{HOST}:{chosen.port} (Ctrl-C ends it)", flush=True)
    Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
