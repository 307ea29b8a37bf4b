"""Whether every machine of a Ray sees the same files as the flow: asked, not believed.

The flow writes a token file into the workspace. A task on every machine reads it there and writes
an answer beside it, which the flow reads. So a machine that does not mount the storage, mounts it
elsewhere, has another folder under the same name, or may not write there is found before the first
piece, which would end on it with a file that is missing.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from upcycle_core.errors import Fault

WAIT_SECONDS = 40.0
"""NFS remembers for half a minute that a file was not there."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Token:
    """A file that was just written.

    Args:
        path: Where, as the flow sees it.
        secret: What it holds; other files under this name do not.
    """

    path: Path
    secret: str

    def answer(self, node: str) -> Path:
        """The file in which the machine ``node`` answers."""
        return self.path.with_name(f"{self.path.name}.{node}")


@contextmanager
def written_token(folder: Path) -> Iterator[Token]:
    """A token in ``folder``, which is created if need be; it and all answers go with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    token = Token(folder.absolute() / f".token-{secrets.token_hex(8)}", secrets.token_hex(16))
    try:
        token.path.write_text(token.secret)
        yield token
    finally:
        for path in folder.glob(f"{token.path.name}*"):
            path.unlink(missing_ok=True)


def look(token: Token, node: str, seconds: float = WAIT_SECONDS) -> str:
    """On a machine: read the token and answer. Returns what hinders it; nothing if all is well."""
    if not _holds(token.path, token.secret, seconds):
        nearest = next(path for path in token.path.parents if path.exists())
        if nearest != token.path.parent:
            return f"{nearest} exists there, but nothing of it below"
        return "a folder of this name is there, but with other files"
    try:
        token.answer(node).write_text(token.secret)
    except OSError as error:
        return f"it may read there, but not write ({error.strerror})"
    return ""


def storage_fault(
    token: Token, node: str, address: str, hindrance: str, seconds: float = WAIT_SECONDS
) -> Fault | None:
    """What is wrong with a machine that has looked, or ``None``.

    Args:
        token: What it looked at.
        node: Its id in Ray.
        address: Where it is.
        hindrance: What ``look`` returned there.
        seconds: How long its answer may take to be seen here.
    """
    if not hindrance and not _holds(token.answer(node), token.secret, seconds):
        hindrance = "what it writes there is not seen here"
    if not hindrance:
        return None
    remedy = (
        f"the Ray node {address} ({node[:8]}) does not share this folder: {hindrance}; mount the "
        "same storage at the same path on every machine and put the workspaces there: "
        "UPCYCLE_HOME=FOLDER"
    )
    return Fault("workspace", str(token.path.parent), remedy)


def _holds(path: Path, secret: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if path.read_text() == secret:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
