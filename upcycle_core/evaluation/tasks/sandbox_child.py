"""The inside of the sandbox: confines this process for good, then runs one program.

``sandbox.py`` starts this file as a script with the standard library alone; nothing imports it. The
request (see ``main``) comes on stdin, the answers leave through the descriptor that the first
argument names: ``READY`` once all confinement holds, then the token if the program's last line has
run, or else what stopped it. Where a part of the confinement cannot be set up the answer is
``REFUSED`` with that part and the error, and the program does not run.
"""

import base64
import ctypes
import json
import math
import os
import resource
import struct
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

READY, REFUSED = b"+", b"-"
PROGRAM = "<program>"  # the file name that tracebacks show

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
SIGKILL = 9

# linux/landlock.h. The three calls have the same numbers on every architecture.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULESET_VERSION, PATH_BENEATH = 1, 1
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
REMOVE_FILE, MAKE_REG, TRUNCATE = 1 << 5, 1 << 8, 1 << 14
READING = READ_FILE | READ_DIR
# No folders: a flat one is always removed again, however much a program puts into it.
WRITING = READING | WRITE_FILE | TRUNCATE | REMOVE_FILE | MAKE_REG

libc = ctypes.CDLL(None, use_errno=True)


def checked(name: str, result: int) -> int:
    """``result`` of a call into the C library; ``OSError`` with ``name`` where it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def syscall(name: str, number: int, *arguments: int | bytes | None) -> int:
    as_words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(name, libc.syscall(ctypes.c_long(number), *as_words))


def prctl(option: int, *arguments: int) -> None:
    """Set an attribute of this process; arguments that are not given are 0."""
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    checked("prctl", libc.prctl(option, *padded))


def limit(seconds: float, limits: Mapping[str, int]) -> None:
    """Bound what this process may use; ``limits`` is {name of an RLIMIT: value}."""
    # The interpreter's own start is not the program's time. Past the soft limit comes SIGXCPU,
    # which a program can ignore; past the hard one SIGKILL.
    cpu = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    for name, value in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def give_up_privileges() -> None:
    """Keep no capability, for good: then root is an ordinary user with root's own files."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    checked("capset", libc.capset(header, bytes(24)))


def handled(abi: int) -> tuple[int, int, int]:
    """Everything that Landlock of version ``abi`` can refuse: file, TCP and scope bits."""
    files = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)  # + REFER, TRUNCATE, IOCTL_DEV
    return (1 << files) - 1, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Refuse every file but those beneath these paths; paths that do not exist are passed over."""
    files, network, scopes = handled(
        syscall("landlock", CREATE_RULESET, None, 0, RULESET_VERSION),
    )
    attributes = struct.pack("=QQQ", files, network, scopes)
    ruleset = syscall("landlock", CREATE_RULESET, attributes, len(attributes), 0)
    for paths, rights in ((readable, READING), (writable, WRITING)):
        for path in paths:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            granted = rights & files
            if not os.path.isdir(path):  # the kernel takes no rights of a folder for a file
                granted &= READ_FILE | WRITE_FILE | TRUNCATE
            rule = struct.pack("=Qi", granted, beneath)
            syscall("landlock", ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
            os.close(beneath)
    syscall("landlock", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def restrict_syscalls(instructions: bytes) -> None:
    """Install a compiled seccomp filter (an array of ``struct sock_filter``, 8 bytes each)."""
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held))
    )
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def describe(error: BaseException, source: str) -> str:
    """The error and the line of the program it came from, in one line."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    number = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = source.split("\n")
    if number is None or not 0 < number <= len(lines):
        return text
    return f"{text[:120]} (line {number}: {lines[number - 1].strip()})"


def deliver(write: Callable[[int, bytes], int], results: int, token: bytes, ran: None) -> None:
    """Say that the program's last line has run."""
    write(results, token)


def run(source: str, take: Callable[[], bytes], results: int) -> None:
    """Run the program as ``__main__`` and say how it ended. Does not return.

    Args:
        source: The program.
        take: Gives the token away, once.
        results: The descriptor that answers leave through.
    """
    # The program may replace what it finds in modules: these are looked up before it starts.
    write, leave, told = os.write, os._exit, describe
    try:
        main_module = types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        code = compile(source, PROGRAM, "exec", dont_inherit=True)
        # While the program runs the token waits among this call's arguments: no frame names it.
        namespace = main_module.__dict__
        deliver(write, results, take(), exec(code, namespace))  # type: ignore[func-returns-value]
    except BaseException as error:
        write(results, told(error, source).encode(errors="replace")[:1000])
    finally:
        leave(0)


def main(results: int) -> None:
    """Read the request, confine, run.

    The request is JSON: "source", "token", "seconds", "limits" {RLIMIT: value}, "readable" and
    "writable" (paths), "filter" (base64).
    """
    part = "start"
    try:
        prctl(PR_SET_PDEATHSIG, SIGKILL)  # a killed parent leaves nothing running
        request: dict[str, Any] = json.load(sys.stdin)
        os.dup2(1, 0)  # /dev/null: the request, token included, is gone
        part = "limits"
        limit(request["seconds"], request["limits"])
        part = "privileges"
        give_up_privileges()
        part = "landlock"
        restrict_files(request["readable"], request["writable"])
        part = "seccomp"
        restrict_syscalls(base64.b64decode(request["filter"]))
    except Exception as error:
        os.write(results, REFUSED + f"{part}: {error}".encode())
        os._exit(1)
    os.write(results, READY)
    run(request.pop("source"), lambda: request.pop("token").encode(), results)


if __name__ == "__main__":
    main(int(sys.argv[1]))
