import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest

from infra import logs
from infra.logs import cut
from infra.services.processes import (
    end_orphans,
    find,
    launch,
    put_aside,
    read_records,
    stop,
    tail,
    write_records,
)

# A parent that has a child, which has a child; each says who it is and how it ended.
FAMILY = """
import pathlib, signal, subprocess, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
below = {"parent": "child", "child": "grandchild"}.get(name)
def end(*_):
    (folder / f"{name}.ended").write_text(str(time.monotonic()))
    time.sleep(0.3)
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN if name == "grandchild" else end)
if below:
    subprocess.Popen([sys.executable, __file__, below, str(folder)])
(folder / f"{name}.pid").write_text(str(__import__("os").getpid()))
time.sleep(600)
"""


@pytest.fixture
def family(tmp_path):
    program = tmp_path / "family.py"
    program.write_text(FAMILY)
    record = launch(
        (sys.executable, str(program), "parent", str(tmp_path)),
        log=tmp_path / "log",
        directory=tmp_path,
        environment=os.environ,
        url="",
    )
    pids = [tmp_path / f"{name}.pid" for name in ("parent", "child", "grandchild")]
    deadline = time.monotonic() + 30
    while not all(path.exists() and path.read_text() for path in pids):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    members = [psutil.Process(int(path.read_text())) for path in pids]
    yield record, members
    for member in members:
        if member.is_running():
            member.kill()


def test_the_log_of_the_last_one_stays_beside_the_new_one(tmp_path):
    def run(text):
        command = (sys.executable, "-c", f"print({text!r}, end='')")
        log = tmp_path / "worker.log"
        record = launch(command, log=log, directory=tmp_path, environment=os.environ, url="")
        with suppress(ChildProcessError):  # it had ended before its object did
            os.waitpid(record.pid, 0)
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    assert run("one") == {"worker.log": "one"}
    assert run("two") == {"worker.log": "two", "worker.log.1": "one"}
    assert run("") == {"worker.log": "", "worker.log.1": "two"}
    assert run("four") == {"worker.log": "four", "worker.log.1": "two"}


def test_a_log_is_put_aside_when_it_is_large(tmp_path):
    log = tmp_path / "engine.log"
    put_aside(log, beyond=10)
    log.write_text("x" * 10)
    put_aside(log, beyond=10)
    assert log.exists()
    log.write_text("x" * 11)
    put_aside(log, beyond=10)
    assert not log.exists()
    assert (tmp_path / "engine.log.1").read_text() == "x" * 11


def test_the_end_of_a_long_log_is_read_alone(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n\xff")
    assert tail(log) == "first\n\N{REPLACEMENT CHARACTER}"
    with log.open("wb") as file:
        file.seek(1 << 30)  # a hole, which takes no disk
        file.write("".join(f"\n{i}" for i in range(100)).encode())
    tracemalloc.start()
    assert tail(log) == "\n".join(str(i) for i in range(80, 100))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_log_that_was_moved_away_has_no_end_to_show(tmp_path):
    assert tail(tmp_path / "log") == ""
    assert tail(tmp_path) == ""


def test_a_log_that_is_cut_while_it_is_written_goes_on_at_its_beginning(tmp_path):
    log, cut = tmp_path / "log", tmp_path / "cut"
    program = (
        "import pathlib, time; print('one', flush=True)\n"
        f"while not pathlib.Path({str(cut)!r}).exists(): time.sleep(0.02)\n"
        "print('two')"
    )
    command = (sys.executable, "-c", program)
    record = launch(command, log=log, directory=tmp_path, environment=os.environ, url="")
    deadline = time.monotonic() + 30
    while log.read_text() != "one\n":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.truncate(log, 0)
    cut.touch()
    os.waitpid(record.pid, 0)
    assert log.read_text() == "two\n"


def test_a_log_stays_small_while_it_is_written_and_its_last_part_is_kept(tmp_path):
    log, rotated = tmp_path / "log", tmp_path / "log.1"
    program = (
        "import sys, time\n"
        "for i in range(200_000):\n"
        "    print(f'line {i}', flush=i % 100 == 0)\n"
        "    if i % 100 == 0: time.sleep(0.001)\n"
        "sys.stdout.flush()\n"
        "time.sleep(0.1)\n"  # what comes last is not written beside a cut
        "print('last')"
    )
    command = (sys.executable, "-c", program)
    record = launch(command, log=log, directory=tmp_path, environment=os.environ, url="")
    largest, kept = 0, []
    while os.waitpid(record.pid, os.WNOHANG) == (0, 0):
        largest = max(largest, log.stat().st_size)
        cut(log, beyond=50_000)
        kept.append(rotated.stat().st_size if rotated.exists() else 0)
    assert largest < 1_000_000  # of 2.5 MB
    assert max(kept) >= 50_000
    cut(log, beyond=50_000)
    before, after = rotated.read_text().splitlines(), log.read_text().splitlines()
    assert (after or before)[-1] == "last"
    # A look may see half of a write, and the other half is lost with the cut: the last line
    # before it and the first one after it may be broken.
    assert all(int(line.removeprefix("line ")) < 200_000 for line in before[1:-1] + after[1:-1])


def test_the_last_part_of_a_log_that_outgrew_its_bound_is_kept(tmp_path):
    log = tmp_path / "log"
    cut(log, beyond=3)
    log.write_text("one")
    cut(log, beyond=3)
    assert [log.read_text(), *tmp_path.glob("*.1")] == ["one"]
    log.write_text("one two")
    cut(log, beyond=3)
    assert (log.read_text(), (tmp_path / "log.1").read_text()) == ("", "two")


def test_logs_are_looked_at_again_after_a_look_that_could_open_nothing(tmp_path, monkeypatch):
    class Folder:
        looks = 0

        def glob(self, pattern):
            self.looks += 1
            if self.looks == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            raise EndOfTest

    class EndOfTest(BaseException):
        pass

    pauses = []
    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=pauses.append))
    with pytest.raises(EndOfTest):
        logs._watch(Folder())
    assert pauses == [logs.LOOK_SECONDS]


def test_a_full_disk_gets_the_room_of_a_log_back(tmp_path):
    log = tmp_path / "log"
    log.write_text("one two")
    (tmp_path / "log.1").symlink_to("/dev/full")
    cut(log, beyond=3)
    assert log.read_text() == ""


def test_a_process_is_found_again_by_its_record(family):
    record, (parent, *_) = family
    found = find(record)
    assert found is not None
    assert found.pid == parent.pid


def test_a_reused_process_id_is_a_stranger(family):
    record, _ = family
    assert find(dataclasses.replace(record, started=record.started - 60)) is None
    assert find(dataclasses.replace(record, command=("python", "-m", "other"))) is None


def test_a_process_is_found_after_the_clock_was_set_back(family, monkeypatch):
    """The kernel then says that the machine started earlier, and every process with it."""
    before = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: before - 3600)
    assert family[1][0].create_time() < time.time() - 3000
    assert find(family[0]) is not None


def test_a_process_of_an_earlier_start_of_the_machine_is_a_stranger(family):
    assert find(dataclasses.replace(family[0], boot="another")) is None


def test_a_process_without_a_command_line_yet_is_found(family, monkeypatch):
    """Between the start of a program and its first instruction there is none."""
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [])
    assert find(family[0]) is not None


def test_stopping_ends_the_whole_family_children_first(family, tmp_path):
    record, members = family
    stop(find(record), grace=2)
    assert not any(m.is_running() and m.status() != psutil.STATUS_ZOMBIE for m in members)
    parent, child = (float((tmp_path / f"{n}.ended").read_text()) for n in ("parent", "child"))
    assert child + 0.3 <= parent
    assert find(record) is None


def test_records_survive_a_round_trip_and_a_torn_file_holds_none(family, tmp_path):
    record, _ = family
    path = tmp_path / "state" / "state.json"
    assert read_records(path) == {}
    write_records(path, {"parent": record})
    assert read_records(path) == {"parent": record}
    path.write_text(path.read_text()[:-10])
    assert read_records(path) == {}


def test_what_runs_for_a_home_is_not_taken_for_that_of_its_copy(family, tmp_path):
    record, _ = family
    home, moved, copied = (tmp_path / name for name in ("home", "moved", "copied"))
    write_records(home / "state.json", {"parent": record})
    shutil.copytree(home, copied)
    assert read_records(copied / "state.json") == {}
    assert read_records(home / "state.json") == {"parent": record}
    home.rename(moved)
    assert read_records(moved / "state.json") == {"parent": record}
    earlier = {"parent": dataclasses.asdict(record)}  # whose records do not name the folder
    (copied / "state.json").write_text(json.dumps(earlier))
    assert read_records(copied / "state.json") == {"parent": record}
    elsewhere = dataclasses.replace(record, boot="another machine's")
    write_records(moved / "state.json", {"parent": elsewhere})
    shutil.copy(moved / "state.json", copied)
    assert read_records(copied / "state.json") == {"parent": elsewhere}


def test_only_processes_whose_owner_is_gone_are_orphans(tmp_path):
    def sleeper(owner, home):
        return subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", "a-server-of-ours"],
            env={**os.environ, "OWNER_OF_TEST": str(owner), "HOME_OF_TEST": str(home)},
        )

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan = sleeper(gone.pid, tmp_path)
    others = [sleeper(os.getpid(), tmp_path), sleeper(gone.pid, tmp_path / "another")]
    try:
        count = end_orphans(
            command="a-server-of-ours",
            environment={"HOME_OF_TEST": str(tmp_path)},
            owner="OWNER_OF_TEST",
            grace=5,
        )
        assert count == 1
        assert orphan.wait(timeout=5) is not None
        assert all(other.poll() is None for other in others)
    finally:
        for process in (orphan, *others):
            process.kill()
            process.wait()
