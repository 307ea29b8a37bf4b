"""Folders that local Rays leave behind: ours are private, and go with what made them.

Ray puts sockets and logs of each Ray into ``session_*`` below ``RAY_TMPDIR`` and removes none. A
killed flow leaves its own; the next flow, or ``flows.tidy``, finds that its processes are gone.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from infra.services.processes import stop

OURS = "upcycle.json"
"""Marks a session as one of this project's, and says which process began it."""
TOKEN = "token"
"""What the servers of a session ask for."""
METRICS = "prom_metrics_service_discovery.json"
"""Where dashboards write beside their sessions who can be asked for figures."""
GRACE_SECONDS = 2.0
LEAVE_SECONDS = 2.0
"""How long the processes of a Ray that has been shut down may go on writing logs."""


def claim(sessions: Path) -> list[Path]:
    """Let nobody else on this machine look into the sessions that this process has begun.

    Args:
        sessions: The folder of all sessions; Ray names each after time and process.

    Returns:
        Those of this process.
    """
    process = psutil.Process()
    owner = json.dumps({"pid": process.pid, "created": process.create_time()})
    named = sessions.glob(f"session_*_{process.pid}")
    # Another user's process may have had this number, and left its own.
    own = [p for p in named if not p.is_symlink() and p.stat().st_uid == os.getuid()]
    for session in own:
        session.chmod(0o700)
        (session / OURS).write_text(owner)
    return own


def write_token(session: Path, token: str) -> Path:
    """Write what a session's servers ask for, for this user alone, into a file that goes with it.

    Returns:
        The file.
    """
    file = session / TOKEN
    file.touch(mode=0o600)
    file.write_text(token)
    return file


def remove_own(sessions: Path) -> None:
    """Remove the sessions of this process, whose Ray has been shut down, or has not come up."""
    for session in claim(sessions):
        _remove(session)


def _remove(session: Path) -> None:
    """Remove a session as soon as its processes let go of it; what stays is the next flow's."""
    mark, deadline = session / OURS, time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < deadline:
        for path in session.iterdir():
            if path != mark:
                _delete(path)
        with suppress(OSError):  # something is written again
            if not _is_used(session) and [*session.iterdir()] == [mark]:
                mark.unlink()
                session.rmdir()
                _remove_shared(session.parent)
                return
        time.sleep(0.05)


def left(sessions: Path) -> Iterator[Path]:
    """Sessions of ours below a folder whose processes are gone."""
    for mark in sorted(sessions.glob(f"session_*/{OURS}")):
        session = mark.parent
        if not session.is_symlink() and not _is_owned(mark) and not _is_used(session):
            yield session


def remove_left(sessions: Path) -> None:
    """Remove what ``left`` finds, and end Ray's agents, which outlive the rest by a minute."""
    for session in left(sessions):
        for process in psutil.process_iter(["name"]):
            if (process.info["name"] or "").startswith("ray::") and _writes(process, session):
                stop(process, grace=GRACE_SECONDS)
        shutil.rmtree(session, ignore_errors=True)
        _remove_shared(sessions)


def _is_owned(mark: Path) -> bool:
    """Whether the process that began a session is still there, and no other with its number."""
    try:
        owner = json.loads(mark.read_text())
        return abs(psutil.Process(owner["pid"]).create_time() - owner["created"]) < 1
    except psutil.NoSuchProcess:
        return False
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return True  # somebody else's, or not to be told


def _writes(process: psutil.Process, session: Path) -> bool:
    """Whether it has a log of the session open: its command line and environment it has hidden."""
    with suppress(psutil.Error):
        return any(Path(file.path).is_relative_to(session) for file in process.open_files())
    return False


def _is_used(session: Path) -> bool:
    """Whether a process names it on its command line, as all of Ray's do."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(session) in word for word in process.info["cmdline"] or ()):
            return True
    return False


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_shared(sessions: Path) -> None:
    """Ray's link to the newest session, where that is gone; a dashboard's list where all are."""
    latest = sessions / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)
    if not [*sessions.glob("session_*")]:
        (sessions / METRICS).unlink(missing_ok=True)
