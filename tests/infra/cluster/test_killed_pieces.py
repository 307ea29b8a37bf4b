"""Pieces whose process is killed each time: said in a line, not begun anew for ever."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
MARGIN = 3e9
PROGRAM = """
import sys
from pathlib import Path
from infra.settings import configure
settings = configure()
from infra.cluster.compute import cluster, run_pieces
from infra.cluster.pieces import Piece
from infra.recipe.resources import Resources
import test_killed_pieces
folder = Path(sys.argv[1])
function = getattr(test_killed_pieces, sys.argv[2])
workers, arguments = int(sys.argv[3]), {"log": folder / "log"}
with cluster(settings, workers, folder):
    piece = Piece(name="big", function=function, arguments=arguments, workers=workers)
    run_pieces([piece], directory=folder / "pieces", resources=Resources(), label="report")
"""


def greedy_piece(*, out, progress, log):
    with log.open("a") as file:
        file.write("begun\n")
    kept = []
    while True:
        kept.append(bytearray(b"x") * 100_000_000)


def shot_piece(*, out, progress, log):
    with log.open("a") as file:
        file.write("begun\n")
    os.kill(os.getpid(), signal.SIGKILL)


def half_shot_piece(*, out, progress, log):
    """One worker of two is killed; the other waits for it."""
    if os.environ["RANK"] == "1":
        shot_piece(out=out, progress=progress, log=log)
    time.sleep(600)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("piece", "workers", "times", "said"),
    [
        ("greedy_piece", 1, 3, "ran out of memory each time that it was begun; let fewer pieces"),
        ("shot_piece", 1, 4, "was killed, as the system does where memory runs out each time"),
        ("half_shot_piece", 2, 4, "lost a worker, as where memory runs out, each time"),
    ],
)
def test_a_piece_that_is_killed_each_time_is_given_up_and_named(
    tmp_path, piece, workers, times, said
):
    memory = psutil.virtual_memory()
    share = (memory.total - memory.available + MARGIN) / memory.total
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "UPCYCLE_HOME": str(tmp_path / "home"),
    }
    if piece == "greedy_piece":  # of the machine's memory, all programs'
        environment["RAY_memory_usage_threshold"] = f"{share:.4f}"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), piece, str(workers)]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=500)
    assert ended.returncode
    assert f"compute = 'report:big': {said}" in ended.stderr.splitlines()[-1]
    log = tmp_path / "log"
    begun = log.read_text().count("begun\n") if log.exists() else 0
    if piece == "greedy_piece":  # a worker may be killed for others' memory before it begins
        assert begun <= times
    else:
        assert begun == times
