"""Pieces on a real Ray: the same bytes for any number of workers, and nothing run twice."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from pico import save_pico

from infra.compute import Piece, cluster, placements, run_pieces
from infra.resources import Resources
from infra.settings import read
from tasks.statistics import statistics_piece
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import merge_statistics
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress

SHARDS = 7
CONFIG = StatisticsConfig(sequence_length=16, batch_size=4, shards=SHARDS, folds=2)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def settings():
    return read(os.environ)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compute")


@pytest.fixture(scope="module")
def statistics_pieces(folder):
    """The statistics of one domain in seven shards."""
    experts = [save_pico(folder / name, seed=i) for i, name in enumerate(("a", "b"))]
    readers = [CheckpointReader(path) for path in experts]
    write_backbone(readers, folder / "backbone", max_shard_bytes=10**9)
    documents = [([(7 * i + j) % 90 for j in range(20 + i)], 20 + i) for i in range(40)]
    write_split(folder / "text", documents, eos_id=0, vocabulary_size=96)
    arguments = {
        "backbone": folder / "backbone",
        "expert": experts[0],
        "corpus": folder / "text",
        "config": CONFIG,
        "device": "cpu",
    }
    return [
        Piece(name=f"shard-{i}", function=statistics_piece, arguments={**arguments, "shard": i})
        for i in range(SHARDS)
    ]


def count_piece(*, out: Path, progress: Progress, log: Path, pause: float = 0.0) -> int:
    with log.open("a") as file:
        file.write("called\n")
    time.sleep(pause)
    out.write_text("done")
    return 3


def faulty_piece(*, out: Path, progress: Progress) -> None:
    out.write_text("half")
    raise InputError(Fault("field", "value", "do this"))


def test_statistics_are_bitwise_the_same_for_any_number_of_workers(
    folder, statistics_pieces, settings
):
    merged, workers = [], []
    for cpus in (1, 2, 7):
        directory = folder / f"pieces-{cpus}"
        with cluster(settings, cpus, ROOT):
            done = run_pieces(
                statistics_pieces, directory=directory, resources=Resources(), label="statistics"
            )
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:  # Ray's record of events lags behind
                placed = {w: n for w, n in placements().items() if any("shard" in x for x in n)}
                if sum(len(names) for names in placed.values()) >= SHARDS:
                    break
                time.sleep(0.5)
            workers.append(placed)
        out = folder / f"merged-{cpus}"
        merge_statistics([done[piece.name].path for piece in statistics_pieces], out)
        merged.append(out.read_bytes())
    assert merged[0] == merged[1] == merged[2]
    for placed in workers:
        names = sorted(name for names in placed.values() for name in names)
        assert names == [f"statistics:shard-{i}" for i in range(SHARDS)]
    assert len(workers[0]) == 1
    assert 2 <= len(workers[2]) <= 7


@pytest.fixture(scope="module")
def ray_of_two(settings):
    """Two workers that can import this file's pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with cluster(settings, 2, ROOT):
            yield


def run(directory, *pieces, resources=None):
    return run_pieces(
        list(pieces), directory=directory, resources=resources or Resources(), label="test"
    )


def test_finished_piece_is_not_run_again(ray_of_two, tmp_path):
    piece = Piece(name="a", function=count_piece, arguments={"log": tmp_path / "log"})
    first = run(tmp_path / "pieces", piece)["a"]
    again = run(tmp_path / "pieces", piece)["a"]
    assert (tmp_path / "log").read_text() == "called\n"
    assert first == again
    assert first.result == 3
    assert first.path.read_text() == "done"
    assert first.started <= first.ended


def test_half_of_a_killed_piece_is_not_taken_for_a_whole(ray_of_two, tmp_path):
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    (pieces / "a.partial").write_text("half")
    (pieces / "a").write_text("renamed, but not recorded")
    piece = Piece(name="a", function=count_piece, arguments={"log": tmp_path / "log"})
    assert run(pieces, piece)["a"].path.read_text() == "done"
    assert json.loads((pieces / "a.json").read_text())["result"] == 3


def test_piece_whose_files_were_taken_is_run_again(ray_of_two, tmp_path):
    piece = Piece(name="a", function=count_piece, arguments={"log": tmp_path / "log"})
    run(tmp_path / "pieces", piece)["a"].path.unlink()
    assert run(tmp_path / "pieces", piece)["a"].path.exists()
    assert (tmp_path / "log").read_text() == "called\ncalled\n"


def test_bad_input_found_by_a_piece_comes_back_as_such(ray_of_two, tmp_path):
    with pytest.raises(InputError, match="field = 'value': do this"):
        run(tmp_path / "pieces", Piece(name="a", function=faulty_piece))
    assert not (tmp_path / "pieces" / "a.json").exists()


def test_request_that_no_machine_can_meet_is_refused(ray_of_two, tmp_path):
    piece = Piece(name="a", function=count_piece, arguments={"log": tmp_path / "log"})
    with pytest.raises(InputError, match="compute gpus = 1: Ray has 0 in all"):
        run(tmp_path / "pieces", piece, resources=Resources(gpus=1))
    with pytest.raises(InputError, match="compute cpus = 3: Ray has 2 in all"):
        run(tmp_path / "pieces", piece, resources=Resources(cpus=3))


def test_second_connection_is_refused(ray_of_two, settings):
    with (
        pytest.raises(InputError, match="connected to Ray already"),
        cluster(settings, 1, ROOT),
    ):
        pass


def test_ray_listens_on_loopback_alone(ray_of_two):
    listening = [
        line.split()[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and _is_ray(line.split()[9])
    ]
    assert listening
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(listening) <= loopback


def _is_ray(inode: str) -> bool:
    """Whether a process below this one, and so a part of its Ray, holds the socket."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        try:
            links = [os.readlink(f) for f in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        if f"socket:[{inode}]" in links:
            return True
    return False
