"""Hashes of files are remembered until the files change, and a memory that fails is none."""

import hashlib
import os
import random
import sqlite3
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from upcycle_core.checkpoints import known as module
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.known import SMALLEST, KnownFiles
from upcycle_core.checkpoints.reader import CheckpointReader

STEP_NS = 30 * 10**6
"""In the place of the two seconds of coarse file systems: some ticks of the kernel's clock."""


@pytest.fixture(autouse=True)
def fine_times(monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", STEP_NS)


def wait():
    """Until a file that was written before is settled."""
    time.sleep(2 * STEP_NS / 1e9)


class Place:
    """A file, a memory, and how often the file was read."""

    def __init__(self, folder):
        self.file = folder / "weights"
        self.file.write_bytes(b"w" * SMALLEST)
        self.memory = folder / "memory" / "known.sqlite"
        self.reads = 0

    def read(self):
        self.reads += 1
        return hashlib.sha256(self.file.read_bytes()).hexdigest()

    def sha256(self, **how):
        verify = how.pop("verify", "changed")
        digest = KnownFiles(self.memory, verify=verify).sha256(self.file, read=self.read, **how)
        assert digest == hashlib.sha256(self.file.read_bytes()).hexdigest()
        return digest

    def flip(self, *, as_before=True):
        """Change the content in place, and put its own time back."""
        before = self.file.stat()
        with self.file.open("r+b") as opened:
            opened.seek(100)
            opened.write(b"W")
        if as_before:
            os.utime(self.file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    wait()
    return made


def test_a_file_is_read_once(place):
    first = place.sha256()
    assert place.sha256() == first
    assert place.reads == 1


def test_a_file_that_looks_otherwise_is_not_recalled(place):
    known = KnownFiles(place.memory)
    assert known.recalled(place.file) is None
    digest = place.sha256()
    assert known.recalled(place.file) == digest
    place.flip()
    assert known.recalled(place.file) is None
    assert place.reads == 1
    place.file.write_bytes(b"small")
    assert known.recalled(place.file) == hashlib.sha256(b"small").hexdigest()


def test_a_file_that_is_moved_is_known(place):
    place.sha256()
    place.file = place.file.rename(place.file.with_name("elsewhere"))
    wait()  # which changed the time of its inode
    place.sha256()
    assert place.reads == 2
    place.sha256()
    assert place.reads == 2


def test_a_small_file_is_read_each_time(place):
    place.file.write_bytes(b"w" * (SMALLEST - 1))
    wait()
    place.sha256()
    place.sha256()
    assert place.reads == 2


def test_a_change_in_place_is_found_though_its_time_was_put_back(place):
    place.sha256()
    place.flip()
    place.sha256()
    assert place.reads == 2


def test_a_file_that_was_just_written_is_not_remembered(place, monkeypatch):
    place.flip(as_before=False)
    with monkeypatch.context() as slowly:
        slowly.setattr(module, "SETTLED_NS", 10**12)
        place.sha256()
        place.sha256()
    assert place.reads == 2
    wait()
    place.sha256()
    place.sha256()
    assert place.reads == 3


def test_what_was_written_by_who_asks_is_remembered_at_once(place, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", 10**12)
    place.sha256(own=True)
    place.sha256()
    assert place.reads == 1


def test_where_times_are_whole_seconds_nothing_new_is_remembered(place, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", 10**12)
    second = int(time.time()) * 10**9
    os.utime(place.file, ns=(second, second))
    place.sha256(own=True)
    place.sha256()
    assert place.reads == 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(place):
    def read():
        digest = hashlib.sha256(place.file.read_bytes()).hexdigest()
        place.flip(as_before=False)
        return digest

    KnownFiles(place.memory).sha256(place.file, read=read)
    wait()
    place.sha256()
    assert place.reads == 1


def test_a_link_to_it_leaves_a_file_known(place):
    place.sha256()
    with KnownFiles(place.memory).linking([place.file, place.file.with_name("absent")]):
        os.link(place.file, place.file.with_name("link"))
        place.file.chmod(0o444)
    place.sha256()
    assert place.reads == 1
    place.file.chmod(0o644)  # which nobody told
    place.sha256()
    assert place.reads == 2


def test_bits_that_change_while_all_times_stay_are_found_by_whole_verification(place):
    before = place.sha256()
    with KnownFiles(place.memory).linking([place.file]):
        place.flip()
    assert KnownFiles(place.memory).sha256(place.file) == before  # as storage that lies
    assert place.sha256(verify="always") != before
    assert place.sha256() != before  # and it is known now


def test_always_reads_each_time(place):
    place.sha256(verify="always")
    place.sha256(verify="always")
    assert place.reads == 2


def test_a_hash_that_was_tampered_with_is_not_believed(place):
    digest = place.sha256()
    with sqlite3.connect(place.memory) as opened:
        rows = opened.execute("SELECT value FROM known").fetchall()
        assert len(rows) == 1
        changed = rows[0][0].replace(digest, "0" * 64)
        opened.execute("UPDATE known SET value = ?", (changed,))
    opened.close()
    assert place.sha256() == digest
    assert place.reads == 2


def test_any_damage_to_the_memory_is_survived(place):
    place.sha256()
    before, draw = place.memory.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(before)
        at = draw.randrange(8 * len(damaged))
        damaged[at // 8] ^= 1 << at % 8
        place.memory.write_bytes(damaged)
        place.sha256()
    for damaged in (b"", b"no database" * 100, before[: len(before) // 2]):
        place.memory.write_bytes(damaged)
        place.sha256()
    place.reads = 0
    place.sha256()
    place.sha256()
    assert place.reads <= 1


def test_where_nothing_can_be_remembered_files_are_read(place):
    place.memory.parent.write_text("a file in the place of the folder")
    place.sha256()
    place.sha256()
    assert place.reads == 2


def test_a_memory_that_somebody_holds_is_waited_for_once(place, monkeypatch):
    place.sha256()
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    holder = sqlite3.connect(place.memory, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    known = KnownFiles(place.memory)
    known.sha256(place.file, read=place.read)
    assert place.reads == 2
    holder.execute("ROLLBACK")
    holder.close()
    known.sha256(place.file, read=place.read)
    assert place.reads == 3
    place.sha256()  # of another process: it was remembered all the while
    assert place.reads == 3


class GivenUp(KnownFiles):
    """Another thread finds that the memory fails as soon as this one has looked whether it is."""

    @property
    def path(self):
        path, self._path = self._path, None
        return path

    @path.setter
    def path(self, path):
        self._path = path


def test_a_memory_that_another_thread_gives_up_meanwhile_is_asked_once_more(place):
    assert GivenUp(place.memory).sha256(place.file) == KnownFiles(None).sha256(place.file)
    place.memory.parent.mkdir(exist_ok=True)
    place.memory.write_text("damaged " * 1000)
    assert GivenUp(place.memory).sha256(place.file) == KnownFiles(None).sha256(place.file)
    assert not place.memory.exists()


def test_processes_share_a_memory(tmp_path):
    for number in range(40):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{number}").write_bytes(bytes([number]) * SMALLEST)
    wait()
    program = (
        "import sys; from pathlib import Path\n"
        "from upcycle_core.checkpoints import known\n"
        "known.SETTLED_NS = 0\n"
        "memory = known.KnownFiles(Path(sys.argv[1]))\n"
        "for _ in range(5):\n"
        "    for file in sorted(Path(sys.argv[2]).iterdir()): memory.sha256(file)\n"
    )
    command = [sys.executable, "-c", program, tmp_path / "memory", tmp_path / "files"]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    right = tree_digest(tmp_path / "files")

    def never():
        raise AssertionError("was not remembered")

    known = KnownFiles(tmp_path / "memory")
    files = (tmp_path / "files").iterdir()
    assert {file.name: known.sha256(file, read=never) for file in files} == right


def test_a_fact_is_found_once_for_the_same_files(tmp_path):
    known = KnownFiles(tmp_path / "known.sqlite")
    asked = []

    def find(value):
        asked.append(value)
        return value

    for value in (None, False, 0.5, ["name"]):
        for _ in range(2):
            assert known.fact("distance", [{"a": "1"}, value], partial(find, value)) == value
    assert asked == [None, False, 0.5, ["name"]]
    assert known.fact("distance", [{"a": "2"}, None], partial(find, 3)) == 3
    assert known.fact("equal", [{"a": "1"}, None], partial(find, 4)) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_among_many_that_is_not_finite_is_found(tmp_path, dtype, value):
    (tmp_path / "config.json").write_text("{}")
    size = 2 * (1 << 20) + 17
    draw = random.Random(f"{dtype} {value}")
    for at in (0, size - 1, draw.randrange(size), min(size, (8 << 20) // dtype.itemsize) - 1):
        bad = torch.randn(size).to(dtype)
        bad[at] = value
        tensors = {"bad": bad, "good": torch.randn(7).to(dtype), "empty": torch.zeros(0, 4)}
        save_file(tensors, tmp_path / "model.safetensors")
        assert CheckpointReader(tmp_path).non_finite == ["bad"]


def test_hash_and_finiteness_of_a_checkpoint_are_remembered(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    tensors = {"good": torch.randn(3000), "bad": torch.full((3,), float("inf"))}
    save_file(tensors, weights)
    wait()
    known = KnownFiles(tmp_path / "known.sqlite")
    reader = CheckpointReader(tmp_path, known=known)
    assert reader.non_finite == ["bad"]
    assert reader.digests == {weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()}

    def never(*_):
        raise AssertionError("was read again")

    monkeypatch.setattr("upcycle_core.checkpoints.reader._scan", never)
    monkeypatch.setattr(module, "_sha256", never)
    again = CheckpointReader(tmp_path, known=known)
    assert again.non_finite == ["bad"]
    assert again.fact("sum", lambda: 1.0, reader) == 1.0
    assert again.fact("sum", never, reader) == 1.0
    assert (
        tree_digest(tmp_path, exclude=["known.sqlite", "config.json"], known=known)[weights.name]
        == (reader.digests[weights.name])
    )
