"""Pieces on a real Ray: the same bytes for any number of workers, and nothing run twice."""

import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
from pico import save_pico
from ray._private.accelerators import get_all_accelerator_resource_names

from infra.cluster.capacity import FOUND, compute_faults, machine, named_faults, room_faults
from infra.cluster.compute import cluster, placements, run_pieces
from infra.cluster.pieces import Piece
from infra.cluster.shared_storage import look, storage_fault, written_token
from infra.recipe.resources import ComputeConfig, Resources, WorkerResources
from infra.settings import read
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import domain_statistics, merge_statistics
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress

SHARDS = 7
CONFIG = StatisticsConfig(sequence_length=16, batch_size=4, shards=SHARDS, folds=2)
ROOT = Path(__file__).resolve().parents[3]


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
        Piece(name=f"shard-{i}", function=domain_statistics, arguments={**arguments, "shard": i})
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


@pytest.mark.faults
@pytest.mark.parametrize("counts", [(1, 2), (3, 7)])
def test_statistics_are_bitwise_the_same_for_any_number_of_workers(
    folder, statistics_pieces, settings, counts
):
    merged, workers = [], []
    for cpus in counts:
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
    assert merged[0] == merged[1]
    for placed in workers:
        names = sorted(name for names in placed.values() for name in names)
        assert names == [f"statistics:shard-{i}" for i in range(SHARDS)]
    for cpus, placed in zip(counts, workers, strict=True):
        assert min(cpus, 2) <= len(placed) <= cpus


@pytest.fixture(scope="module")
def ray_of_two(settings):
    """Two workers that can import this file's pieces; those that were there before any piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with cluster(settings, 2, ROOT):
            below = psutil.Process().children(recursive=True)
            yield [process for process in below if process.name().startswith("ray::IDLE")]


def test_no_worker_is_waited_for_before_there_is_a_piece(ray_of_two):
    """Ray would wait for ever for one that is killed as it starts."""
    assert ray_of_two == []


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


MACHINES = [
    {"CPU": 4.0, "GPU": 1.0, "accelerator_type:A100": 1.0, "ssd": 2.0, "node:10.0.0.1": 1.0},
    {"CPU": 8.0, "memory": 12_000.0, "object_store_memory": 10.0, "node:10.0.0.2": 1.0},
    {"CPU": 8.0, "memory": 12_000.0, "object_store_memory": 10.0, "node:10.0.0.3": 1.0},
]


@pytest.mark.parametrize(
    ("resources", "workers", "fault"),
    [
        (Resources(cpus=8), 1, None),
        (Resources(cpus=4, gpus=1), 1, None),
        (Resources(cpus=4), 5, None),
        (Resources(cpus=21), 1, "compute cpus = 21: Ray has 20 in all"),
        (Resources(cpus=9), 1, "compute cpus = 9: Ray has 20 in all, but no machine more than 8"),
        (Resources(gpus=2), 1, "compute gpus = 2: Ray has 1 in all"),
        (Resources(cpus=8, gpus=1), 1, "compute = '8 CPUs and 1 GPUs'.*1 x 4 CPUs and 1 GPUs; 2 x"),
        (Resources(cpus=5), 4, "they have 1 x 4 CPUs and 1 GPUs; 2 x 8 CPUs"),
        (Resources(cpus=6), 4, r"compute cpus = 24: Ray has 20 in all.*6 for each of 4 workers"),
        (Resources(gpus=0.5), 2, "has one GPU"),
        (Resources(gpus=2), 2, "has one GPU"),
        (Resources(memory=9_000), 1, None),
        (
            Resources(memory=40_000),
            1,
            "compute memory = 40000: Ray has 24_000 in all; ask for less, or start Ray with more",
        ),
        (
            Resources(memory=12_001),
            1,
            "compute memory = 12001: Ray has 24_000 in all, but no machine more than 12_000, and",
        ),
        (Resources(memory=9_000), 3, "compute memory = 27000: Ray has 24_000 in all"),
        (Resources(memory=7_000), 3, "cannot give 3 x 1 CPUs and 0 GPUs and 7_000 bytes, "),
        (Resources(gpus=1, accelerator="A100"), 1, None),
        (
            Resources(gpus=1, accelerator="H100"),
            1,
            r"compute accelerator = 'H100': no machine .* has it \(they have \['A100'\]\); name "
            "one that there is",
        ),
        (
            Resources(cpus=8, gpus=1, accelerator="A100"),
            1,
            "cannot give 1 x 8 CPUs and 1 GPUs and A100, .* they have 1 x 4 CPUs and 1 GPUs and "
            "A100; 2 x 8 CPUs and 0 GPUs; ",
        ),
        (Resources(resources={"ssd": 2}), 1, None),
        (Resources(resources={"ssd": 2}), 2, "compute resources.ssd = 4: Ray has 2 in all"),
        (
            Resources(resources={"disk": 1}),
            1,
            r"compute resources.disk = 1: no machine .* has it \(they have \['ssd'\]\); remove it, "
            r"or start Ray with it \(ray start --resources\)",
        ),
        (
            Resources(cpus=5, resources={"ssd": 1}),
            1,
            "cannot give 1 x 5 CPUs and 0 GPUs and 1 ssd, .* 1 x 4 CPUs and 1 GPUs and 2 ssd; 2 x",
        ),
    ],
)
def test_pieces_that_no_machine_can_hold_are_told_before_they_wait_for_ever(
    resources, workers, fault
):
    faults = " ".join(str(fault) for fault in room_faults(resources, workers, MACHINES))
    assert re.search(fault, faults) if fault else not faults


def test_no_machine_at_all_is_told_too():
    (fault,) = room_faults(Resources(), 1, [])
    assert "Ray has 0 in all" in str(fault)


def test_a_machine_proves_that_it_shares_a_folder(tmp_path):
    def fault(token, hindrance):
        return storage_fault(token, "node", "10.0.0.2", hindrance, seconds=0)

    with written_token(tmp_path / "home") as token:
        assert look(token, "node", seconds=0) == ""
        assert fault(token, "") is None
        token.answer("node").unlink()
        assert "not seen here" in str(fault(token, ""))

        moved = dataclasses.replace(token, path=tmp_path / "other" / token.path.name)
        assert look(moved, "node", seconds=0) == f"{tmp_path} exists there, but nothing of it below"
        moved.path.parent.mkdir()
        assert "with other files" in look(moved, "node", seconds=0)
        moved.path.write_text("of another flow")
        assert "with other files" in look(moved, "node", seconds=0)
        message = str(fault(moved, look(moved, "node", seconds=0)))
        assert "10.0.0.2 (node)" in message
        assert "UPCYCLE_HOME=FOLDER" in message
    assert not list((tmp_path / "home").iterdir())


def test_ray_has_what_is_known_of_the_machine_before_it_runs(ray_of_two):
    [node] = ray.nodes()
    assert machine(2).items() <= node["Resources"].items()


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


def test_every_kind_that_asks_for_more_than_any_machine_has_is_named_before_work_begins():
    compute = ComputeConfig(
        experts=Resources(cpus=9),
        statistics=Resources(cpus=4),
        baselines=WorkerResources(cpus=4, workers=3),
        evaluation=Resources(gpus=1),
        assembly=Resources(memory=10**15, resources={"ssd": 1}),
    )
    faults = {f.field: f for f in compute_faults(compute, [machine(8)])}
    assert set(faults) == {
        "compute.experts.cpus",
        "compute.baselines.cpus",
        "compute.evaluation.gpus",
        "compute.assembly.memory",
        "compute.assembly.resources.ssd",
    }
    assert "Ray has 8 in all; ask for less" in faults["compute.experts.cpus"].remedy
    before_ray = {f.field for f in compute_faults(compute, [machine(8)], known=machine(8))}
    assert before_ray == set(faults) - {"compute.evaluation.gpus", "compute.assembly.resources.ssd"}
    two = [{"CPU": 8.0}, {"CPU": 8.0}]
    [fault] = (f for f in compute_faults(compute, two) if f.field.startswith("compute.experts"))
    assert "no machine more than 8" in fault.remedy


def test_kinds_that_ask_for_nothing_of_their_own_are_let_pass():
    assert not list(compute_faults(ComputeConfig(cpus=1), [machine(1)]))
    assert not list(compute_faults(ComputeConfig(), []))


def test_a_local_ray_has_no_resource_of_the_user_s_which_is_known_before_it_runs():
    there = {"ssd": 2, "TPU": 1, "node:127.0.0.1": 1}  # the others are Ray's own names
    compute = ComputeConfig(statistics=Resources(resources=there), experts=WorkerResources(cpus=2))
    [fault] = named_faults(compute)
    assert (fault.field, fault.value) == ("compute.statistics.resources.ssd", 2)
    assert """ray start --head --resources='{"ssd": 2}') and name that in RAY""" in fault.remedy
    detected = {*get_all_accelerator_resource_names()} - {"GPU"}  # which has a key of its own
    assert detected == {*FOUND}
