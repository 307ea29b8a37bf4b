"""Ports of this machine: which are free, and whether a server answers."""

import json
import socket
import urllib.request
from typing import Any

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of loopback."""
    with socket.socket() as probe:
        # As the servers do: what a closed server leaves behind is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def answers(url: str) -> bool:
    """Whether a server answers at ``url``."""
    try:
        with _open(url) as answer:
            return answer.status == 200
    except OSError:
        return False


def worker_is_online(api: str, pool: str) -> bool:
    """Whether a worker of ``pool`` waits for runs."""
    try:
        with _open(f"{api}/work_pools/{pool}/workers/filter", body=b"{}") as answer:
            return any(worker["status"] == "ONLINE" for worker in json.load(answer))
    except OSError:  # the pool is not there yet
        return False


def _open(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    # Without proxies: the user's proxy knows nothing of our loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=10)
