"""A process that ends a command when its owner is gone.

``python -m infra.serving.keeper FOLDER COMMAND``

The owner holds the other end of standard input. The system closes it however the owner ends, so
that neither SIGKILL nor a crash leaves an engine behind, on any system and from any thread. What is
started belongs to the keeper's session, whose id the owner knows: it ends the rest if the keeper
itself is killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

import psutil

from infra.services.processes import stop

GRACE_SECONDS = 3.0
"""How long each part of an engine may take to end in an orderly way."""


def keep(folder: str, command: Sequence[str]) -> int:
    """Run ``command`` in ``folder`` until it ends or standard input does.

    Returns:
        Its exit code; as shells have it, 128 and the signal that killed it.
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=folder)
    Thread(target=_end_with_owner, args=(child,), name="owner", daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def end_session(leader: int) -> None:
    """Kill what is left in the session of a keeper; nothing if that is empty."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _end_with_owner(child: subprocess.Popen) -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written: it returns when the owner closes it
    with suppress(psutil.NoSuchProcess):
        stop(psutil.Process(child.pid), grace=GRACE_SECONDS)
    end_session(os.getpid())


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
