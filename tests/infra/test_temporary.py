"""Folders of processes that were killed go with the next of their kind."""

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

from infra import temporary
from infra.temporary import OWNER, owned_folder, remove_left

HOLDS = (
    "import sys, time; from infra.temporary import owned_folder\n"
    "with owned_folder('kept') as folder:\n"
    "    (folder / 'model').write_bytes(b'x' * 100)\n"
    "    print(folder, flush=True); time.sleep(600)"
)


def test_what_a_killed_process_left_is_removed_and_what_is_held_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed, alive = (
        subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    try:
        left, held = (Path(process.stdout.readline().strip()) for process in (killed, alive))
        killed.kill()
        killed.wait()
        with owned_folder("other"):
            assert (left / "model").exists()
        with owned_folder("kept") as own:
            assert not left.parent.exists()
            assert (held / "model").exists()
            assert [*own.iterdir()] == []
        assert not own.parent.exists()
        assert [*tmp_path.iterdir()] == [held.parent]
    finally:
        for process in (killed, alive):
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_folder_that_is_just_being_made_is_not_taken_for_one_that_was_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flock = fcntl.flock

    def slow(file, how):
        if how == fcntl.LOCK_EX:
            remove_left("kept")  # as another process does, before this one holds its mark
        flock(file, how)

    monkeypatch.setattr(temporary.fcntl, "flock", slow)
    with owned_folder("kept") as folder:
        assert folder.is_dir()
        assert (folder.parent / OWNER).exists()
    assert not folder.parent.exists()
