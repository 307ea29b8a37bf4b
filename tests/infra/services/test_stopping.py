"""Signals to a command, at any moment of its life."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from project import ROOT
from terminal import CTRL_C, Terminal, processes

from flows.running.arguments import parser_of
from infra.services.stopping import LINE, SIGNALS, ended_in_time, run_command, run_stoppable

MARK = "UPCYCLE_TEST_MARK"
PROGRAM = """
import logging, os, signal, subprocess, sys, threading, time
from infra.services import stopping

def start_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

def wait():
    while True:
        time.sleep(0.05)  # a signal that comes before a sleep begins is heard after it

def deaf():
    lines = ["begun"]
    while True:
        try:
            while lines:
                print(lines.pop(), flush=True)
            wait()
        except KeyboardInterrupt:
            pass

def call():
    {work}

{first}
stopping.GRACE_SECONDS = {grace}
sys.exit(stopping.run_stoppable(call))
"""
WAIT = """
    print("begun", flush=True)
    wait()
"""


@pytest.fixture
def begin(tmp_path):
    """Starts a command that does ``work``, and waits until it has begun."""
    running = []

    def start(work, *, grace=600.0, first=""):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(work=work.strip(), grace=grace, first=first))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: str(tmp_path)}
        running.append(Terminal(str(program), environment=environment))
        running[-1].wait_for(lambda: "begun" in running[-1].shown)
        return running[-1]

    yield start
    for terminal in running:
        terminal.close()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_command_with_one_line(begin, number):
    command = begin(WAIT)
    assert command.send(number).split() == LINE.split()
    assert command.process.returncode == 128 + number


def test_ctrl_c_puts_away_what_was_begun_and_logs_nothing_more(begin):
    command = begin("""
    try:
        print("begun", flush=True)
        wait()
    finally:
        logging.error("crash detected")
        print("put away")
    """)
    assert command.press(CTRL_C).splitlines() == ["^C", LINE, "put away"]
    assert command.process.returncode == 130


def test_what_comes_of_a_signal_is_no_error_of_its_own(begin):
    command = begin("""
    try:
        print("begun", flush=True)
        wait()
    finally:
        raise RuntimeError("nobody answers any more")
    """)
    assert command.press(CTRL_C).splitlines() == ["^C", LINE]
    assert command.process.returncode == 130


@pytest.mark.parametrize(
    "work",
    ["start_child(); deaf()", "start_child(); threading.Thread(target=deaf).start(); deaf()"],
    ids=["call", "thread"],
)
def test_what_does_not_end_is_killed_with_its_children(begin, tmp_path, work):
    command = begin(work, grace=0.2)
    command.wait_for(lambda: command.shown.count("begun") == work.count("deaf"))
    assert len(processes(MARK, str(tmp_path))) == 2
    assert command.press(CTRL_C).splitlines() == ["^C", LINE]
    assert command.process.returncode == 130
    assert not processes(MARK, str(tmp_path))


def test_a_thread_that_does_not_end_is_killed_after_the_command(begin):
    command = begin("threading.Thread(target=deaf).start(); wait()", grace=0.2)
    assert command.press(CTRL_C).splitlines() == ["^C", LINE]
    assert command.process.returncode == 130


def test_a_second_ctrl_c_ends_at_once(begin):
    command = begin("deaf()")
    command.type(CTRL_C)
    command.wait_for(lambda: LINE in command.shown)
    assert command.press(CTRL_C).strip() == "^C"
    assert command.process.returncode == 130


def test_what_a_library_makes_of_sigterm_ends_in_time(begin, tmp_path):
    """As Prefect, where the server that it tells was stopped as well."""
    first = "stopping.TAKEN_SECONDS = 0.2"
    work = """
    stopping._OWN.clear()  # as where Prefect's worker has started the flow
    signal.signal(signal.SIGTERM, lambda *_: print("taken", flush=True))
    with stopping.ended_in_time():
        start_child()
        deaf()"""
    command = begin(work, first=first)
    taken, said = filter(None, command.send(signal.SIGTERM).splitlines())
    assert (taken, said) == ("taken", LINE)
    assert command.process.returncode == 143
    assert not processes(MARK, str(tmp_path))


def test_what_a_library_took_over_stops_a_command_as_ctrl_c_does(begin):
    work = """
    def taken(*_):
        raise SystemExit("taken")

    signal.signal(signal.SIGTERM, taken)
    with stopping.ended_in_time():
        print("begun", flush=True)
        wait()"""
    command = begin(work)
    assert command.send(signal.SIGTERM).strip() == LINE
    assert command.process.returncode == 143


def test_what_ended_before_a_signal_came_is_the_librarys_again():
    handlers = []

    def theirs(*_):
        handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with ended_in_time():
            assert signal.getsignal(signal.SIGTERM) is not theirs
        os.kill(os.getpid(), signal.SIGTERM)
        assert handlers == [theirs]
        for thread in threading.enumerate():
            if thread.name == "ending":
                thread.join(timeout=10)
                assert not thread.is_alive()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_stays_so(begin):
    """As below nohup, or where a script has started the command in the background."""
    command = begin(
        """
    print("begun", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    return 7
    """,
        first="signal.signal(signal.SIGINT, signal.SIG_IGN)",
    )
    assert command.process.wait() == 7


def test_what_is_out_of_reach_hears_no_ctrl_c_and_its_command_does(begin, tmp_path):
    command = begin("""
    try:
        with stopping.out_of_reach():
            child = subprocess.Popen([sys.executable, "-c", "input()"])
            print("begun", flush=True)
            while True:
                time.sleep(0.05)
    finally:
        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            print("the child goes on")
        child.kill()
    """)
    assert command.press(CTRL_C).splitlines() == ["^C", LINE, "the child goes on"]


def test_a_command_within_a_command_is_put_away_too(begin, tmp_path):
    inner = tmp_path / "inner.py"
    work = """
    try:
        print("inner begun", flush=True)
        wait()
    finally:
        time.sleep(0.5)
        print("inner put away")
    """
    inner.write_text(PROGRAM.format(work=work.strip(), grace=600, first=""))
    command = begin(f"""
    try:
        stopping.run_command([sys.executable, {str(inner)!r}], directory=".")
    finally:
        print("outer put away")
    """)
    shown = command.press(CTRL_C).splitlines()
    assert shown == ["^C", LINE, "inner put away", "outer put away"]
    assert command.process.returncode == 130


def test_a_command_within_a_command_that_fails_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        run_command([sys.executable, "-c", "raise SystemExit(3)"], directory=ROOT)


def test_a_command_leaves_nothing_behind_and_lets_errors_through():
    before = [signal.getsignal(number) for number in SIGNALS], threading.active_count()
    assert run_stoppable(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        run_stoppable(lambda: 1 // 0)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name == "stopping":
            thread.join(timeout=10)
    assert ([signal.getsignal(number) for number in SIGNALS], threading.active_count()) == before


MODULES = sorted(
    f"flows.{path.stem}" for path in (ROOT / "flows").glob("*.py") if "@command" in path.read_text()
)
FEW = ("flows.dume", "flows.grow")  # one wrapper stops them all


def words_of(module):
    """What a command needs to be told, or it would end before it imports anything."""
    needed = [a for a in parser_of(module.partition(".")[2])._actions if a.required]
    named = {"recipe": "recipes/demo.yaml", "add": "recipes/tasks.yaml", "out": "out"}
    words = []
    for action in needed:
        words += [*action.option_strings[:1], named.get(action.dest, "name")]
    return words


@pytest.mark.parametrize(
    "module",
    [pytest.param(m, marks=[] if m in FEW else pytest.mark.faults) for m in MODULES],
)
def test_ctrl_c_during_start_up_ends_every_flow_with_one_line(tmp_path, module):
    """The imports of some seconds are held, and end as those in C do that are interrupted."""
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "__init__.py").write_text(
        "import time\n"
        "try:\n"
        "    print('begun', flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        "except BaseException:\n"
        "    raise ImportError('initialization failed')\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    with Terminal("-m", module, *words_of(module), environment=environment) as command:
        command.wait_for(lambda: "begun" in command.shown)
        shown = command.press(CTRL_C).splitlines()
        assert sorted(line for line in shown if line) == sorted(["^C", LINE])
        assert command.process.returncode == 130
