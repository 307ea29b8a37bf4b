"""The user's own Ray: how a flow comes to it."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from infra.cluster.answers import brief
from infra.services.stopping import handlers_kept
from infra.settings import Settings, environment_of
from upcycle_core.errors import Fault, InputError

# What ends up on the machines of a cluster, and so what pieces can import there: nothing else that
# lies in the checkout is looked at. The rules are those of .gitignore files; `!/.` is the checkout.
SHIPPED = ("infra", "tasks", "upcycle_core")
EXCLUDED = ["/*", "!/.", *(f"!/{package}" for package in SHIPPED), "__pycache__"]
# What `infra.settings` sets that pieces heed. A local Ray has the environment of the flow.
PIECE_VARIABLES = (
    "DO_NOT_TRACK",
    "HF_HUB_DISABLE_TELEMETRY",
    "MPLBACKEND",
    "LRU_CACHE_CAPACITY",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    # Heeded where a piece's owner is: of a client (ray://), that is a process beside the head.
    "RAY_task_oom_retries",
    "TOKENIZERS_PARALLELISM",
)
# What a user may have set for datasets that pieces open. A token is no word for a runtime
# environment, which Ray shows.
HUB_VARIABLES = ("HF_ENDPOINT", "HF_HUB_OFFLINE")
PROBE_SECONDS = 10.0
TRIES = 3
"""How often a client (ray://) asks a head that is too busy to take it in."""


def connect(settings: Settings, code: Path, quiet: Mapping[str, Any]) -> None:
    """Connect this process to it, with the code that its machines are sent.

    Args:
        settings: Name the Ray.
        code: The checkout.
        quiet: More of what ``ray.init`` takes.

    Raises:
        InputError: There is none where they say, or it does not take this process in.
    """
    address = settings.ray_address
    found = environment_of(settings)
    try:
        _probe(address)
        with handlers_kept():
            _ask_in(
                address=address,
                runtime_env={
                    "working_dir": str(code),
                    "excludes": EXCLUDED,
                    "env_vars": {
                        **{name: found[name] for name in PIECE_VARIABLES},
                        **{name: found[name] for name in HUB_VARIABLES if name in found},
                    },
                },
                **quiet,
            )
    except (OSError, RuntimeError, ValueError) as error:
        ray.shutdown()
        remedy = (
            f"no connection ({brief(error)}); give ray://HOST:10001 from any machine, or "
            "HOST:6379 on a machine of that Ray. If it asks for a token: put it into "
            "~/.ray/auth_token and set RAY_AUTH_MODE=token. Unset RAY_ADDRESS to compute here"
        )
        raise InputError(Fault("RAY_ADDRESS", address, remedy)) from error


def _ask_in(**asked: Any) -> None:
    """Connect; ask again where the head gives up on the process that a client is to talk to.

    Ray waits half a minute for that one to start, which a busy head may take longer for.
    """
    for left in reversed(range(TRIES)):
        try:
            ray.init(**asked)
        except ConnectionAbortedError:
            if not left:
                raise
            ray.shutdown()
        else:
            return


def _probe(address: str) -> None:
    """Knock: where nobody listens, Ray would try for minutes and then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
