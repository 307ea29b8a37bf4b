"""Receivers of notices on loopback: a webhook, and a mail server."""

import json
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@contextmanager
def webhook(*answers: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and what it gets.

    Args:
        *answers: Status of the first answers; those after them are 200.
    """
    received: list[dict[str, Any]] = []
    rest = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = rest.pop(0) if rest else 200
            if status == 200:
                received.append(json.loads(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}/secret-path", received


@contextmanager
def mail_server() -> Iterator[tuple[int, list[str]]]:
    """Its port, and the mails that it gets."""
    received: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.say("220 here")
            for line in iter(self.rfile.readline, b""):
                word = line.split()[0].upper()
                if word == b"DATA":
                    self.say("354 go on")
                    lines = iter(self.rfile.readline, b".\r\n")
                    received.append(b"".join(lines).decode())
                self.say("221 bye" if word == b"QUIT" else "250 fine")

        def say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

    with _serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        yield port, received


@contextmanager
def _serving(server: socketserver.TCPServer) -> Iterator[int]:
    with server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
