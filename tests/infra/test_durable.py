"""Small files are replaced whole, and on the disk before anything else relies on them."""

import errno
import os
from pathlib import Path

import pytest

from infra import durable
from infra.cluster.pieces import finish
from infra.cluster.worker import Performed
from infra.durable import sync_tree, write_atomically


@pytest.fixture
def synced(monkeypatch):
    """Paths in the order in which they reached the disk, each with what the folder held then."""
    found = []

    def sync(path):
        found.append((path.name, sorted(os.listdir(path.parent))))

    monkeypatch.setattr(durable, "sync", sync)
    return found


def test_a_text_is_on_the_disk_before_it_takes_the_place_of_the_old(tmp_path, synced):
    (tmp_path / "state.json").write_text("old")
    write_atomically(tmp_path / "state.json", "new")
    assert synced[0] == ("state.json.partial", ["state.json", "state.json.partial"])
    assert [name for name, _ in synced] == ["state.json.partial", tmp_path.name]
    assert os.listdir(tmp_path) == ["state.json"]
    assert (tmp_path / "state.json").read_text() == "new"


def test_a_kill_before_that_leaves_the_old_text(tmp_path, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt

    (tmp_path / "state.json").write_text("old")
    monkeypatch.setattr(durable, "sync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "state.json", "new")
    assert (tmp_path / "state.json").read_text() == "old"


def test_a_tree_reaches_the_disk_with_every_file_and_folder(tmp_path, synced):
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "file").write_text("x")
    sync_tree(tmp_path / "out")
    assert {name for name, _ in synced} == {"out", "deep", "file"}


def test_what_a_piece_has_left_is_on_the_disk_before_it_counts_as_finished(tmp_path, synced):
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "tensor").write_text("x")
    done = Performed(None, 1)
    finish(tmp_path, "a", done, unfinished=tmp_path / "a.partial", started=0.0, ended=1.0)
    names = [name for name, _ in synced]
    assert names.index("tensor") < names.index("a.json.partial")


def test_a_folder_of_a_file_system_that_syncs_none_is_left_alone_and_a_file_is_not():
    proc = Path("/proc")  # it has no such call, as some network file systems
    durable.sync(proc)
    with pytest.raises(OSError, match="Invalid argument"):
        durable.sync(proc / "self" / "stat")


def test_a_folder_that_may_be_entered_and_not_listed_is_written_in(tmp_path, monkeypatch):
    """As the one that a DVC remote lies in, of another user and with the mode 711."""
    opened = os.open

    def refused(path, flags):
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags)

    monkeypatch.setattr(os, "open", refused)
    write_atomically(tmp_path / "state.json", "new")
    assert (tmp_path / "state.json").read_text() == "new"
