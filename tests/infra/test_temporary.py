"""Folders of processes that were killed go with the next of their kind."""

import subprocess
import sys
import tempfile
from pathlib import Path

from infra.temporary import owned_folder

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
