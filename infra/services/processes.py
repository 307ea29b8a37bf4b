"""Processes that outlive the command that started them: how they are told from strangers."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

# The kernel may correct the boot time by a second between two readings.
CLOCK_TOLERANCE_SECONDS = 2.0
TAIL_LINES, TAIL_BYTES = 20, 65_536
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class ProcessRecord:
    """A process that was started, precise enough not to be confused with a later one.

    Args:
        pid: Its process id; process ids are reused by the operating system.
        started: Seconds from the machine's start to its own, whatever is done to the clock.
        command: The arguments it was started with.
        url: Where it answers; empty if it does not listen.
        boot: Which start of the machine that was.
        host: What the machine is called.
        machine: What it is known by, whatever it is called.
        place: The folder of its record.
    """

    pid: int
    started: float
    command: tuple[str, ...]
    url: str = ""
    boot: str = ""
    host: str = ""
    machine: str = ""
    place: str = field(default="", compare=False)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it may run on another machine, which has this file too."""
        return self.boot != _boot() and self.machine not in ("", _machine())


def launch(
    command: Sequence[str], *, log: Path, directory: Path, environment: Mapping[str, str], url: str
) -> ProcessRecord:
    """Start ``command`` in a session of its own, so that it goes on when the caller ends.

    Args:
        command: Program and arguments.
        log: Where its output goes; the last one's stays beside it, see ``put_aside``.
        directory: Where it runs.
        environment: All of its environment.
        url: Where it will answer; empty if it does not listen.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    put_aside(log)
    with log.open("ab") as output:  # so that who cuts it (logrotate's copytruncate) leaves no hole
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,
        )
    started = _started(psutil.Process(process.pid))
    return ProcessRecord(
        process.pid, started, tuple(command), url, _boot(), platform.node(), _machine()
    )


def put_aside(log: Path, *, beyond: int = 0) -> None:
    """Keep a log as ``NAME.log.1``, in the place of the one before; not one that may go on.

    Args:
        log: It may be missing.
        beyond: Bytes that it may have and go on.
    """
    if log.exists() and log.stat().st_size > beyond:
        log.replace(log.with_name(f"{log.name}.1"))


def tail(log: Path) -> str:
    """The last lines of a log, of which no more is read; none of one that cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # moved away: what it is shown with goes on
        return ""
    return "\n".join(lines[-TAIL_LINES:])


def find(record: ProcessRecord) -> psutil.Process | None:
    """Return the recorded process; ``None`` if it has ended, even if its id is another's now."""
    try:
        process = psutil.Process(record.pid)
        same_start = abs(_started(process) - record.started) <= CLOCK_TOLERANCE_SECONDS
        # A process that is just becoming the command has no command line for a moment.
        same_command = set(record.command[1:]) <= set(process.cmdline() or record.command)
        alive = process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    same_boot = record.boot == _boot()
    return process if same_boot and same_start and same_command and alive else None


def stop(process: psutil.Process, *, grace: float) -> None:
    """End ``process`` and everything it started.

    What it started directly ends first: a Prefect worker that is asked to stop kills its flows at
    once, before they can put their things in order.

    Args:
        process: What is stopped. psutil compares start times, so that a reused id is left alone.
        grace: Seconds for each of the two to end in an orderly way before it is killed.
    """
    family = [process, *_children(process, recursive=True)]
    for asked in (_children(process), [process]):
        for member in asked:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        psutil.wait_procs(asked, timeout=grace)
    family += [child for member in family for child in _children(member, recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=grace)


def _started(process: psutil.Process) -> float:
    """Seconds from the machine's start: times since the epoch move when the clock is set."""
    return process.create_time() - psutil.boot_time()


def _boot() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def _machine() -> str:
    known = MACHINE_ID.read_text().strip() if MACHINE_ID.exists() else ""
    return known or platform.node()


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def read_records(path: Path) -> dict[str, ProcessRecord]:
    """Read the records written by ``write_records``; an absent or torn file holds none.

    Nor does a copy of it: what runs works for the home that was copied.
    """
    try:
        content = json.loads(path.read_text())
        records = {
            name: ProcessRecord(**{**entry, "command": tuple(entry["command"])})
            for name, entry in content.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {n: r for n, r in records.items() if not _is_of_another_home(r, path.parent)}


def write_records(path: Path, records: Mapping[str, ProcessRecord]) -> None:
    """Write ``records`` so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging, place = path.with_suffix(".tmp"), {"place": str(path.parent.absolute())}
    content = {name: asdict(record) | place for name, record in records.items()}
    staging.write_text(json.dumps(content, indent=2))
    staging.replace(path)


def _is_of_another_home(record: ProcessRecord, folder: Path) -> bool:
    """Whether the folder that a record was written in is still there, and another one.

    Of another start of the machine, or on another one, nothing that it names runs here anyway.
    """
    if not record.place or record.boot != _boot():
        return False
    try:
        return not os.path.samefile(record.place, folder)
    except OSError:  # its home has been moved
        return False


def end_orphans(*, command: str, environment: Mapping[str, str], owner: str, grace: float) -> int:
    """End processes that outlived the one they worked for.

    Args:
        command: Part of their command line.
        environment: Variables they must have been started with.
        owner: The variable that holds their owner's process id.
        grace: Seconds to end in an orderly way.

    Returns:
        How many there were.
    """
    orphans = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if command not in " ".join(process.cmdline()):
                continue
        except psutil.Error:  # another user's, or gone
            continue
        ours = environment.items() <= variables.items()
        if ours and not psutil.pid_exists(int(variables.get(owner, process.pid))):
            orphans.append(process)
    for process in orphans:
        stop(process, grace=grace)
    return len(orphans)
