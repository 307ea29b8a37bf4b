"""Programs run as asked, and those that want out are kept in: seen from the outside each time.

Where the sandbox is broken these programs do what they say. So each aims at something that its test
made, uses bounded amounts, and signals nobody but the test.
"""

import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyseccomp
import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks import sandbox, sandbox_filter
from upcycle_core.evaluation.tasks.sandbox import Limits, Outcome, run_program, sandbox_faults

ROOT = Path(__file__).resolve().parents[4]
FORBIDDEN = """
fork vfork execve execveat kill tkill tgkill ptrace process_vm_readv process_vm_writev
io_uring_setup io_uring_enter bpf unshare setns mount umount2 pivot_root chroot keyctl add_key
request_key perf_event_open pidfd_open pidfd_send_signal pidfd_getfd memfd_create socket
socketpair connect bind sendto sendmsg shmget msgget mq_open userfaultfd prctl seccomp personality
open creat openat2 truncate chmod fchmod fchmodat chown fchown lchown setxattr fsetxattr utimensat
flock link linkat symlink symlinkat mkdir mkdirat mknod mknodat inotify_init1 setsid setpgid
setpriority sched_setaffinity setuid capset name_to_handle_at open_by_handle_at
"""
EVERYWHERE = """
import os
for fd in range(4096):
    try:
        os.write({}, b"passed")
    except OSError:
        pass
"""
ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, pyseccomp.ALLOW)  # BPF_RET | BPF_K
SHORT = Limits(seconds=0.3)
TASK = 'def double(x):\n    """Twice x."""\n'
TESTS = "\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n"


def processes_of(folder: Path) -> list[int]:
    """Processes whose HOME lies in ``folder``: programs, and whatever they may have started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"HOME={folder}".encode() in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


def _until(holds, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Where the programs' folders are made; after every test no folder and no process is left."""
    folder = tmp_path / "folders"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    try:
        _until(lambda: not processes_of(folder), seconds=5)  # a killed one takes a moment
    finally:
        for process in processes_of(folder):
            os.kill(process, signal.SIGKILL)
    assert not list(folder.iterdir())


def assert_all_refused(*statements: str, setup: str = "") -> None:
    """Run the statements in one program; each must raise PermissionError there."""
    outcome = run_program(
        f"""
import ctypes, fcntl, os, resource, signal, socket, subprocess, sys
{setup}
went_through = []
for statement in {statements!r}:
    try:
        exec(statement)
    except PermissionError:
        continue
    except BaseException as error:
        went_through.append((statement, error))
    else:
        went_through.append(statement)
assert not went_through, went_through
assert not os.path.exists("started")
"""
    )
    assert outcome == Outcome(True, "passed")


# Programs as benchmarks have them


def test_right_program_passes_and_wrong_one_names_its_assertion():
    end = "\ncheck(double)\n"
    assert run_program(TASK + "    return 2 * x" + TESTS + end) == Outcome(True, "passed")
    assert run_program(TASK + "    return x * x" + TESTS + end) == Outcome(
        False, "failed: AssertionError (line 7: assert candidate(-1) == -2)"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "def f(:\n    pass",
            "failed: SyntaxError: invalid syntax (<program>, line 1) (line 1: def",
        ),
        ("x = 1\nraise ValueError('a\\nb\\x1b[1m')", "failed: ValueError: a b[1m (line 2: raise"),
        ("raise ValueError('x' * 500)", "failed: ValueError: xxx"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "failed: ended before"),
        ("import ctypes\nctypes.string_at(0)", "killed (SIGSEGV)"),
        ("'\ud800'", "failed: UnicodeEncodeError"),
        ("\0", "failed: "),
    ],
)
def test_reason_is_one_short_printable_line(source, reason):
    outcome = run_program(source)
    assert not outcome.passed
    assert outcome.reason.startswith(reason)
    assert outcome.reason.isprintable()
    assert len(outcome.reason) <= 200


def test_program_is_main_with_the_whole_standard_library_and_nothing_else():
    source = """
from __future__ import annotations
import asyncio, bz2, dataclasses, decimal, hashlib, json, math, multiprocessing, pickle, queue
import random, re, sqlite3, statistics, sys, tempfile, threading, time, typing, uuid

@dataclasses.dataclass
class Pair:
    first: int

assert __name__ == "__main__" and typing.get_type_hints(Pair) == {"first": int}
assert pickle.loads(pickle.dumps(Pair(3))) == Pair(3)
assert hashlib.md5(b"").hexdigest() == "d41d8cd98f00b204e9800998ecf8427e"
results = queue.Queue()
threads = [threading.Thread(target=results.put, args=(n,)) for n in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert results.qsize() == 4
with open("own.txt", "w") as file:
    file.write("here")
with open("own.txt", "a+") as file:
    file.seek(0)
    assert file.read() == "here"
with tempfile.TemporaryFile() as file:
    file.write(b"x")
open("/dev/null", "w").write("x"), open("/dev/urandom", "rb").read(1)
assert sys.stdin.read() == ""
time.sleep(0.001)
try:
    import numpy
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("site-packages")
"""
    assert run_program(source) == Outcome(True, "passed")


def test_environment_is_four_names_and_hashes_repeat(monkeypatch):
    monkeypatch.setenv("UPCYCLE_SECRET", "hunter2")
    source = "import os\nraise SystemExit((sorted(os.environ), os.environ['HOME'] == os.getcwd()))"
    shown = "(['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED'], True)"
    assert shown in run_program(source).reason
    reasons = {run_program("raise SystemExit(hash('upcycle'))").reason for _ in range(3)}
    assert len(reasons) == 1


# Programs that pass without having run to their end


@pytest.mark.parametrize(
    "early",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "import os\nos.closerange(0, 4096)",
        "import os\nos.closerange(0, 4096)\nos._exit(0)",
        f"{EVERYWHERE.format('fd')}",
        f"{EVERYWHERE.format('os.dup(fd)')}\nos._exit(0)",
        "import os\nos.write = os._exit = lambda *_: None\nassert False",
        "import ctypes\nctypes.CDLL(None).exit(0)",
    ],
)
def test_ending_early_or_writing_everywhere_is_no_pass(early):
    assert not run_program(f"{early}\n").passed


def test_a_hundred_megabytes_of_output_go_nowhere(capfd):
    source = (
        "import sys\nfor stream in (sys.stdout, sys.stderr):\n    stream.write('x' * 50_000_000)"
    )
    assert run_program(source).passed
    assert capfd.readouterr() == ("", "")


# Limits


@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import signal\nfor number in signal.valid_signals() - {9, 19, 32, 33}:\n"
        "    signal.signal(number, signal.SIG_IGN)\nimport time\ntime.sleep(50)",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nwhile 1: pass",
        "import os\nos.closerange(0, 4096)\nwhile True: pass",
    ],
)
def test_endless_program_is_stopped_at_the_limit(loop):
    started = time.monotonic()
    assert run_program(loop, limits=SHORT) == Outcome(False, "timed out after 0.3 s")
    assert 0.3 <= time.monotonic() - started < 40  # and not when the program pleases


def test_processor_time_ends_a_program_by_itself():
    source = """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
assert 10 <= soft <= 12 and hard == soft + 1, (soft, hard)
resource.setrlimit(resource.RLIMIT_CPU, (1, hard))
while True: pass
"""
    assert run_program(source) == Outcome(False, "timed out after 10 s")


def test_memory_is_bounded_and_named():
    assert "more than 256 MiB of memory: MemoryError" in _allocate("").reason
    caught = _allocate("raise SystemExit(f'got {len(held)} MiB')").reason
    assert 100 < int(caught.split("got ")[1].split()[0]) < 256


def _allocate(afterwards: str) -> Outcome:
    source = f"""
held = []
try:
    for _ in range(1000):
        held.append(bytearray(1 << 20))
except MemoryError:
    {afterwards or "raise"}
"""
    return run_program(source, limits=Limits(memory_bytes=256 << 20))


def test_huge_file_is_cut_off():
    source = """
import os
try:
    with open("huge", "wb", buffering=0) as file:
        for _ in range(100):
            file.write(bytes(100_000))
except OSError as error:
    raise SystemExit(f"{error.strerror}: {os.path.getsize('huge')} bytes")
"""
    outcome = run_program(source, limits=Limits(file_bytes=250_000))
    assert "File too large: 250000 bytes" in outcome.reason


def test_full_folder_stops_the_program():
    many = "for n in range(100_000):\n    open(str(n), 'w').close()"
    assert run_program(many) == Outcome(False, "killed (files): more than 1000 in its folder")
    large = "for n in range(900):\n    open(str(n), 'wb').write(bytes(100_000))\nwhile True: pass"
    outcome = run_program(large, limits=Limits(folder_bytes=2 << 20))
    assert outcome == Outcome(False, "killed (files): more than 2 MiB in its folder")


def test_folder_is_removed_whatever_lies_in_it(folders):
    source = """
import os
for n in range(50):
    os.close(os.open(f"\\n{n}", os.O_CREAT | os.O_WRONLY, 0))
os.umask(0o777)
open("x" * 255, "w").close()
assert len(os.listdir()) == 51
"""
    assert run_program(source).passed
    assert_all_refused(
        "os.mkdir('a')", "os.chmod('.', 0)", "os.rmdir(os.getcwd())", "os.mkfifo('p')"
    )


def test_limits_must_be_positive():
    with pytest.raises(InputError, match="seconds = 0"):
        Limits(seconds=0)


# Getting out


def test_no_process_is_started():
    assert_all_refused(
        "os.fork() or (os.setsid(), time.sleep(60))",
        "subprocess.run([sys.executable, '-c', 'open(\"started\", \"w\")'])",
        "subprocess.Popen('sleep 60', shell=True, start_new_session=True)",
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)).start()",
        "multiprocessing.get_context('spawn').Process(target=time.sleep, args=(60,)).start()",
        "os.posix_spawn('/bin/sh', ['sh', '-c', 'echo > started'], {})",
        "os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
        "os.setsid()",
        setup="import multiprocessing, time",
    )
    assert run_program("import os\nos.system('echo > started')\nassert not os.listdir()").passed


def test_dangerous_system_calls_are_refused():
    names = FORBIDDEN.split()
    numbers = [pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in names]
    calls = {name: n for name, n in zip(names, numbers, strict=True) if n >= 0}
    assert len(calls) > 50
    clone3 = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, "clone3")
    source = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {calls!r}.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    assert (result, ctypes.get_errno()) == (-1, errno.EPERM), (name, result)
assert libc.syscall({clone3}, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS
"""
    assert run_program(source) == Outcome(True, "passed")


@pytest.fixture(params=["home", "temporary"])
def victim(request, tmp_path):
    folder = Path(tempfile.mkdtemp(dir=Path.home())) if request.param == "home" else tmp_path / "v"
    folder.mkdir(exist_ok=True)
    file = folder / "secret.txt"
    file.write_text("hunter2")
    file.chmod(0o640)
    yield file
    assert [entry.name for entry in folder.iterdir()] == ["secret.txt"]
    assert file.read_text() == "hunter2"
    assert file.stat().st_mode & 0o777 == 0o640
    file.unlink()
    folder.rmdir()


def test_files_outside_are_neither_read_nor_changed(victim):
    before = victim.stat()
    path = str(victim)
    assert_all_refused(
        f"open({path!r}).read()",
        f"open({path!r}, 'w')",
        f"open({path!r}, 'a')",
        f"os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.truncate({path!r}, 0)",
        f"os.remove({path!r})",
        f"os.chmod({path!r}, 0)",
        f"os.chown({path!r}, 1, 1)",
        f"os.utime({path!r}, (0, 0))",
        f"os.setxattr({path!r}, 'user.x', b'')",
        f"os.rename({path!r}, 'mine')",
        f"os.link({path!r}, 'mine')",
        f"os.symlink({path!r}, 'mine')",
        f"os.rename('own', {str(victim.parent / 'placed')!r})",
        f"open({str(victim.parent / 'new')!r}, 'w')",
        f"os.mkdir({str(victim.parent / 'new')!r})",
        f"os.listdir({str(victim.parent)!r})",
        f"os.chdir({str(victim.parent)!r}) or open('secret.txt')",
        "open('/etc/passwd')",
        setup="open('own', 'w').close()",
    )
    assert victim.stat() == before


def test_other_processes_are_not_looked_into():
    parent = os.getpid()
    assert_all_refused(
        *(f"open('/proc/{process}/environ').read()" for process in (parent, "self", 1)),
        *(f"open('/proc/{parent}/{name}', 'rb')" for name in ("mem", "maps", "cmdline", "fd/0")),
        f"os.listdir('/proc/{parent}/fd')",
        "os.listdir('/proc')",
    )
    outcome = run_program(f"raise SystemExit(open('/proc/{parent}/environ').read())")
    assert "PermissionError" in outcome.reason
    assert "PATH=" not in outcome.reason


def test_no_connection_and_no_datagram_leaves(tmp_path):
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    stream, datagram = (socket.socket(socket.AF_UNIX, k) for k in (1, 2))
    paths = [f"{os.path.relpath(tmp_path)}/{name}" for name in ("s", "d")]
    with tcp, udp, stream, datagram:
        stream.bind(paths[0])
        datagram.bind(paths[1])
        stream.listen()
        unix = [os.path.abspath(path) for path in paths]
        assert_all_refused(
            f"socket.create_connection({tcp.getsockname()!r})",
            "socket.create_server(('127.0.0.1', 0))",
            f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {udp.getsockname()!r})",
            f"socket.socket(socket.AF_UNIX).connect({unix[0]!r})",
            f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {unix[1]!r})",
            "socket.socketpair()",
            "socket.socket(socket.AF_INET6)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        )
        for listener in (tcp, udp, stream, datagram):
            listener.setblocking(False)
        for silent in (tcp.accept, stream.accept, lambda: udp.recv(1), lambda: datagram.recv(1)):
            with pytest.raises(BlockingIOError):
                silent()


def test_parent_gets_no_signal_and_keeps_its_limits():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = (limits[0] - 1, limits[1])
    parent = os.getpid()
    try:
        assert_all_refused(
            f"os.kill({parent}, signal.SIGUSR1)",
            f"signal.pidfd_send_signal(os.pidfd_open({parent}), signal.SIGUSR1)",
            f"fcntl.fcntl(0, fcntl.F_SETOWN, {parent})",
            f"resource.prlimit({parent}, resource.RLIMIT_NOFILE, {lower})",
            f"os.setpriority(os.PRIO_PROCESS, {parent}, 19)",
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not heard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


def test_capabilities_are_gone_whatever_the_filter_allows(monkeypatch):
    monkeypatch.setattr(sandbox, "compiled_filter", lambda: ALLOW_ALL)
    assert_all_refused("os.setuid(1)", "os.chroot('.')", "os.mknod('d', 0o20600, os.makedev(1, 3))")


def test_limits_cannot_be_raised():
    source = """
import resource
names = ("AS", "FSIZE", "NOFILE", "CORE")
found = [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names]
assert found == [(1 << 30,) * 2, (1 << 20,) * 2, (64, 64), (0, 0)], found
assert resource.getrlimit(resource.RLIMIT_NPROC)[1] <= 4096
for name in names:
    try:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (1 << 40, 1 << 40))
    except ValueError:
        continue
    raise AssertionError(name)
"""
    assert run_program(source) == Outcome(True, "passed")


# What is left behind, and machines that cannot confine


def test_program_dies_with_a_killed_parent(folders):
    program = "import time\nopen('started', 'w').close()\ntime.sleep(100)"
    script = f"""
from upcycle_core.evaluation.tasks.sandbox import Limits, run_program
run_program({program!r}, limits=Limits(seconds=100))
"""
    environment = {**os.environ, "TMPDIR": str(folders)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment) as parent:
        try:
            _until(lambda: list(folders.glob("*/started")))
        finally:
            parent.kill()
    _until(lambda: not processes_of(folders))
    for folder in folders.iterdir():  # nobody was left to remove it
        shutil.rmtree(folder)


def test_interrupted_caller_leaves_nothing(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_program("while True: pass")


def test_programs_of_several_threads_do_not_meet():
    found = {}

    def work(number: int) -> None:
        alone = "import os\nopen('mine', 'x').close()\nassert os.listdir() == ['mine']"
        found[number] = run_program(f"{alone}\nassert {number} % 2").passed

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: bool(number % 2) for number in range(8)}


def test_this_machine_confines():
    assert sandbox_faults() == []


def test_confinement_that_does_not_hold_is_a_fault(monkeypatch):
    monkeypatch.setattr(sandbox, "compiled_filter", lambda: ALLOW_ALL)
    (fault,) = sandbox_faults()
    assert "the confinement does not hold" in fault.value


def test_limits_too_small_for_an_interpreter_are_a_fault():
    assert len(sandbox_faults(limits=Limits(memory_bytes=1 << 20))) == 1


def test_other_systems_are_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    (fault,) = sandbox_faults()
    assert "Linux only" in str(fault)
    with pytest.raises(InputError, match="darwin"):
        run_program("pass")


def test_missing_library_is_named(monkeypatch):
    sandbox_filter.compiled_filter.cache_clear()
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    (fault,) = sandbox_faults()
    assert "pip install pyseccomp" in str(fault)


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        ("landlock", "pyseccomp.ERRNO(38), 444"),
        ("landlock", "pyseccomp.ERRNO(1), 446"),
        ("seccomp", "pyseccomp.ERRNO(22), 'prctl', pyseccomp.Arg(0, pyseccomp.EQ, 22)"),
        ("privileges", "pyseccomp.ERRNO(22), 'prctl', pyseccomp.Arg(0, pyseccomp.EQ, 38)"),
        ("limits", "pyseccomp.ERRNO(1), 'prlimit64', pyseccomp.Arg(1, pyseccomp.EQ, 9)"),
    ],
)
def test_no_program_runs_where_a_part_is_missing(part, rule):
    """In a process whose kernel refuses that part, a program's datagram does not arrive."""
    with socket.socket(type=socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        send = f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {listener.getsockname()!r})"
        script = f"""
import pyseccomp
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.sandbox import run_program, sandbox_faults
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule({rule})
rules.load()
(fault,) = sandbox_faults()
assert fault.value == {part!r} and "no program runs without it" in fault.remedy, fault
try:
    print(run_program({f"import socket; {send}"!r}))
except InputError as error:
    print("refused")
"""
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("refused\n", "")
        with pytest.raises(BlockingIOError):
            listener.recv(1)


LOOKS_FOR_THE_TOKEN = """
import gc, os, sys
found, frame = [], sys._getframe()
while frame is not None:
    found += [*frame.f_locals.values(), *frame.f_globals.values()]
    found += [*gc.get_referents(frame), *gc.get_referents(frame.f_code)]
    frame = frame.f_back
for _ in range(3):
    found += [
        inner
        for one in found
        if isinstance(one, (dict, list, tuple, type(lambda: 0)))
        for inner in (one.values() if isinstance(one, dict) else gc.get_referents(one))
    ]
texts = {one for one in found if isinstance(one, (str, bytes)) and len(one) == 32}
for text in texts:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, text if isinstance(text, bytes) else text.encode())
        except OSError:
            pass
os._exit(0)
"""


def test_the_token_is_in_no_frame_that_the_program_can_reach():
    outcome = run_program(LOOKS_FOR_THE_TOKEN)
    assert not outcome.passed
    assert "ended before its last line" in outcome.reason
