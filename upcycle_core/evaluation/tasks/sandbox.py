"""Programs that a model wrote, each in a process of its own that can do no harm.

Scoring a model's code means running it, and nobody has read it (Chen et al. 2021, section 2.3). A
program runs in a fresh interpreter that first confines itself (``sandbox_child.py``): resource
limits; no capabilities; Landlock, so that it reads the interpreter and the system's libraries and
writes in one empty folder; a seccomp filter (``sandbox_filter.py``) that knows what the standard
library needs and answers EPERM to the rest: processes, sockets, signals, modes of files among it.

What is left: a program that knows a path learns size, owner and mode of that file, which Landlock
does not hide, never its content. And the verdict comes from its own interpreter: the token keeps a
program that ends early, writes to every descriptor or looks through the frames below its own from
passing, not one that searches the memory of the interpreter.
"""

import base64
import glob
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.tasks.sandbox_filter import compiled_filter

CHILD = Path(__file__).with_name("sandbox_child.py")
READY, REFUSED = b"+", b"-"
START_SECONDS = 60.0  # for the interpreter and its confinement; a program's own time starts after
TICK_SECONDS = 0.1  # how often the folder is looked at
ANSWER_BYTES = 4096
REASON_CHARACTERS = 200

# Tried by ``sandbox_faults``: what must be refused is, and what programs need is there.
SELF_TEST = """
import decimal, hashlib, os, socket, threading
hashlib.md5(b"").hexdigest()
thread = threading.Thread(target=int)
thread.start()
thread.join()
open("own", "w").close()
for forbidden in (os.fork, socket.socket, lambda: open("/etc/passwd"), lambda: os.kill(1, 0)):
    try:
        forbidden()
    except PermissionError:
        continue
    raise SystemError("the confinement does not hold")
"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use.

    Args:
        seconds: CPU time and wall-clock time, from the program's first line.
        memory_bytes: Address space, that of the interpreter (about 30 MiB) included.
        file_bytes: The size of one file.
        folder_bytes: All files that the program keeps in its folder. Looked at ten times a second.
        files: Files in its folder; also ten times a second.
        descriptors: Open at a time.
        tasks: Threads and processes of the user, others included, beyond which no thread starts;
            the kernel does not count those of root.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    folder_bytes: int = 64 << 20
    files: int = 1000
    descriptors: int = 64
    tasks: int = 4096

    def __post_init__(self) -> None:
        raise_faults(
            Fault(name, value, "must be positive")
            for name, value in vars(self).items()
            if not value > 0
        )


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Args:
        passed: Its last line has run.
        reason: One line of at most 200 characters: "passed", "timed out after 10 s",
            "failed: AssertionError (line 3: assert f(2) == 4)" and the like.
    """

    passed: bool
    reason: str


STANDARD = Limits()


def run_program(source: str, *, limits: Limits = STANDARD) -> Outcome:
    """Run a Python program that nobody has read, with the standard library alone.

    It runs as ``__main__``, its output goes nowhere, its input is empty. It passes if it
    gets to the end of its last line.

    Args:
        source: The whole program, its tests included.
        limits: What it may use.

    Raises:
        InputError: This machine cannot confine programs (``sandbox_faults`` says so beforehand).
            The program has not run.
    """
    if sys.platform != "linux":
        remedy = "generated programs run on Linux only: leave such tasks out or evaluate on Linux"
        raise InputError(Fault("sandbox", sys.platform, remedy))
    instructions = compiled_filter()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        request = _request(source, token, folder, instructions, limits)
        with _child(request, folder) as (process, answers):
            answer, stopped = _watch(process, answers, folder, limits)
        status = process.returncode
    if not answer.startswith(READY):
        raise InputError(_refusal(answer, status))
    if stopped:
        return Outcome(False, stopped)
    return _judge(answer.removeprefix(READY), token.encode(), status, limits)


def sandbox_faults(*, limits: Limits = STANDARD) -> list[Fault]:
    """What keeps this machine from confining programs, found by running one that tries to get out.

    Returns:
        Nothing where programs can be run; else what is missing and what to do.
    """
    try:
        outcome = run_program(SELF_TEST, limits=limits)
    except InputError as error:
        return list(error.faults)
    if outcome.passed:
        return []
    remedy = "a trial of harmless and forbidden calls did not end as it must: use another machine"
    return [Fault("sandbox", outcome.reason, remedy)]


def _request(source: str, token: str, folder: str, instructions: bytes, limits: Limits) -> bytes:
    """What the child reads, see ``sandbox_child.main``."""
    libraries = [sys.base_prefix, sys.base_exec_prefix, "/usr", *sorted(glob.glob("/lib*"))]
    request = {
        "source": source,
        "token": token,
        "seconds": limits.seconds,
        "limits": {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": limits.descriptors,
            "RLIMIT_NPROC": limits.tasks,
            "RLIMIT_CORE": 0,
        },
        "readable": [*libraries, "/etc/ld.so.cache", "/dev/zero", "/dev/urandom"],
        "writable": [folder, "/dev/null"],
        "filter": base64.b64encode(instructions).decode(),
    }
    return json.dumps(request).encode()


@contextmanager
def _child(request: bytes, folder: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The interpreter at work in ``folder`` and where to read its answers; ends with the block."""
    answers, answering = os.pipe()
    with (
        os.fdopen(answers, "rb"),
        os.fdopen(answering, "wb") as writer,
        os.fdopen(os.memfd_create("request"), "wb") as stdin,  # a pipe could fill up and block us
    ):
        stdin.write(request)
        stdin.seek(0)
        process = subprocess.Popen(
            # Not -I, which forgets PYTHONHASHSEED: the environment is ours, -s -P do the rest.
            [sys.executable, "-s", "-P", "-S", "-B", str(CHILD), str(answering)],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[answering],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        writer.close()
        try:
            yield process, answers
        finally:
            # Before it is reaped, so that the number still names this group and no other.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _watch(
    process: subprocess.Popen, answers: int, folder: str, limits: Limits
) -> tuple[bytes, str]:
    """Wait until the program has ended or must be stopped.

    Returns:
        What it answered, and why it must be stopped: "" if it ended by itself.
    """
    answer = b""
    deadline = time.monotonic() + START_SECONDS
    ended = os.pidfd_open(process.pid)
    poller = select.poll()
    for descriptor in (answers, ended):
        poller.register(descriptor, select.POLLIN)
    try:
        while (remaining := deadline - time.monotonic()) > 0:
            ready = {found for found, _ in poller.poll(1000 * min(remaining, TICK_SECONDS))}
            if answers in ready:
                said = os.read(answers, ANSWER_BYTES)
                if not said:
                    poller.unregister(answers)
                elif not answer:
                    deadline = time.monotonic() + limits.seconds
                answer = (answer + said)[:ANSWER_BYTES]
            elif ended in ready:  # and everything it said has been read
                return answer, ""
            if full := _overfull(folder, limits):
                return answer, full
        return answer, f"timed out after {limits.seconds:g} s"
    finally:
        os.close(ended)


def _overfull(folder: str, limits: Limits) -> str:
    """Why the program is stopped for what it keeps in its folder, or ""."""
    count, size = 0, 0
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > limits.files:
                return f"killed (files): more than {limits.files} in its folder"
            try:
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:  # removed meanwhile
                continue
    if size > limits.folder_bytes:
        return f"killed (files): more than {limits.folder_bytes >> 20} MiB in its folder"
    return ""


def _refusal(answer: bytes, status: int) -> Fault:
    """Why the child did not come as far as running the program."""
    if not answer.startswith(REFUSED):
        return Fault("sandbox", sys.executable, f"did not start a program (exit status {status})")
    part, _, error = answer.removeprefix(REFUSED).decode(errors="replace").partition(": ")
    remedies = {
        "landlock": "needs Linux 5.13 or newer with Landlock among its security modules (lsm=)",
        "seccomp": "needs a kernel with CONFIG_SECCOMP_FILTER",
    }
    remedy = remedies.get(part, "cannot be set up on this machine")
    return Fault("sandbox", part, f"{remedy}; no program runs without it ({error})")


def _judge(answer: bytes, token: bytes, status: int, limits: Limits) -> Outcome:
    """What the end of a program that was not stopped means."""
    if answer == token:
        return Outcome(True, "passed")
    if status == -signal.SIGXCPU:
        return Outcome(False, f"timed out after {limits.seconds:g} s")
    if status < 0:
        return Outcome(False, f"killed ({signal.Signals(-status).name})")
    if not answer:
        return Outcome(False, f"failed: ended before its last line (exit status {status})")
    text = "".join(c for c in " ".join(answer.decode(errors="replace").split()) if c.isprintable())
    if text.startswith("MemoryError"):
        text = f"more than {limits.memory_bytes >> 20} MiB of memory: {text}"
    reason = f"failed: {text}"
    if len(reason) > REASON_CHARACTERS:
        reason = reason[: REASON_CHARACTERS - 1] + "…"
    return Outcome(False, reason)
