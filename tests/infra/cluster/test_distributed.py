"""Pieces of several workers on a real Ray, with gloo between them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from pico import VOCABULARY, save_pico_tokenizer
from ray.train import WorkerGroupError
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM

from infra.cluster.compute import cluster, run_pieces
from infra.cluster.distributed import cause
from infra.cluster.pieces import Piece
from infra.cluster.private import WorkerHealthCheckFailedError
from infra.cluster.progress import progress_file
from infra.cluster.worker import WorkerLost
from infra.recipe.resources import Resources
from infra.settings import read
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress
from upcycle_core.training.config import MoEObjective, Sharding, TrainingConfig
from upcycle_core.training.trainer import train

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
ROOT = Path(__file__).resolve().parents[3]
LENGTH = 16
CONFIG = TrainingConfig(
    steps=6,
    batch_size=2,
    sequence_length=LENGTH,
    gradient_accumulation=2,
    learning_rate=3e-3,
    warmup_steps=1,
    precision="fp32",
    checkpoint_steps=3,
    log_steps=1,
)


@pytest.fixture(scope="module")
def ray_of_two():
    """Two CPUs, and workers that can import this file's pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with cluster(read(os.environ), 2, ROOT):
            yield


def run(directory, *pieces, resources=None, watch=lambda: None):
    return run_pieces(
        list(pieces),
        directory=directory,
        resources=resources or Resources(),
        label="test",
        watch=watch,
    )


def helpers():
    """Processes of Ray Train below this one."""
    names = ("RayTrainWorker", "TrainController", "SynchronizationActor", "PlacementGroup")
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        found += [title] if any(name in title for name in names) else []
    return found


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def listening():
    """Local addresses that this process listens on."""
    links = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    return [
        line.split()[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in links
    ]


def sum_piece(*, out: Path, progress: Progress, start: float) -> dict:
    rank = torch.distributed.get_rank()
    value = torch.tensor(start + rank)
    torch.distributed.all_reduce(value)
    progress.metrics({"rank": rank}, step=rank)
    out.mkdir(exist_ok=True)
    (out / str(rank)).write_text(str(value.item()))
    return {
        "sum": value.item(),
        "backend": torch.distributed.get_backend(),
        "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
        "listening": listening(),
    }


def failing_piece(*, out: Path, progress: Progress) -> None:
    if torch.distributed.get_rank() == 1:
        raise InputError(Fault("field", "value", "do this"))
    torch.distributed.barrier()  # the other never comes


def dying_piece(*, out: Path, progress: Progress, log: Path) -> int:
    with log.open("a") as file:
        file.write(f"{torch.distributed.get_rank()}\n")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1 and log.read_text().count("1") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
    return 5


def waiting_piece(*, out: Path, progress: Progress) -> None:
    progress.metrics({"here": 1.0}, step=0)
    time.sleep(600)


def hungry_piece(*, out: Path, progress: Progress, megabytes: int) -> int:
    status = Path("/proc/self/status").read_text()
    before = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    held = torch.ones(megabytes * 1_000_000, dtype=torch.uint8)
    time.sleep(1)
    assert len(held) == megabytes * 1_000_000
    return 1024 * int(before)


def test_workers_share_one_result_and_leave_nothing(ray_of_two, tmp_path):
    home = sorted(str(path) for path in Path.home().rglob("*"))
    pieces = tmp_path / "pieces"
    piece = Piece(name="a", function=sum_piece, arguments={"start": 10.0}, workers=2)
    done = run(pieces, piece)["a"]
    assert done.result["sum"] == 21.0
    assert done.result["backend"] == "gloo"
    assert done.result["threads"] == 1
    assert done.result["folder"] == os.getcwd()
    assert {path.name: path.read_text() for path in done.path.iterdir()} == dict.fromkeys(
        "01", "21.0"
    )
    events = [json.loads(line) for line in progress_file(pieces, "a").read_text().splitlines()]
    assert [event["metrics"] for event in events if "metrics" in event] == [{"rank": 0}]
    assert done.result["listening"]
    assert set(done.result["listening"]) <= LOOPBACK
    assert 10**7 < done.peak_memory_bytes < 10**10
    assert sorted(path.name for path in pieces.iterdir()) == ["a", "a.json", "a.lock", "a.progress"]
    assert sorted(str(path) for path in Path.home().rglob("*")) == home
    assert wait_until(lambda: not helpers()), helpers()


@pytest.mark.faults
def test_failure_of_one_worker_ends_the_piece(ray_of_two, tmp_path):
    piece = Piece(name="a", function=failing_piece, workers=2)
    with pytest.raises(InputError, match="field = 'value': do this"):
        run(tmp_path / "pieces", piece)
    assert not list((tmp_path / "pieces").glob("*.json"))
    assert not list((tmp_path / "pieces").glob("*.workers"))
    assert wait_until(lambda: not helpers()), helpers()


@pytest.mark.faults
def test_piece_whose_worker_was_killed_is_run_again(ray_of_two, tmp_path):
    arguments = {"log": tmp_path / "log"}
    piece = Piece(name="a", function=dying_piece, arguments=arguments, workers=2)
    assert run(tmp_path / "pieces", piece)["a"].result == 5
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "0", "1", "1"]


@pytest.mark.faults
def test_cancelled_piece_leaves_no_worker(ray_of_two, tmp_path):
    class Cancelled(Exception):
        pass

    def watch():
        report = progress_file(tmp_path / "pieces", "a")
        if report.exists() and "here" in report.read_text():
            raise Cancelled

    with pytest.raises(Cancelled):
        run(
            tmp_path / "pieces",
            Piece(name="a", function=waiting_piece, workers=2),
            watch=watch,
        )
    assert wait_until(lambda: not helpers()), helpers()
    assert wait_until(lambda: ray.available_resources().get("CPU") == 2)


def test_more_workers_than_ray_has_room_for_are_refused(ray_of_two, tmp_path):
    piece = Piece(name="a", function=sum_piece, arguments={"start": 0.0}, workers=3)
    with pytest.raises(InputError, match=r"compute cpus = 3: Ray has 2 in all.*1 for each of 3"):
        run(tmp_path / "pieces", piece)
    piece = Piece(name="a", function=sum_piece, arguments={"start": 0.0}, workers=2)
    with pytest.raises(InputError, match="compute cpus = 4"):
        run(tmp_path / "pieces", piece, resources=Resources(cpus=2))


@pytest.mark.faults
def test_peak_memory_is_that_of_the_piece(ray_of_two, tmp_path):
    for name, megabytes in (("small", 1), ("large", 200), ("small-again", 1)):
        piece = Piece(name=name, function=hungry_piece, arguments={"megabytes": megabytes})
        done = run(tmp_path / "pieces", piece)[name]
        held = done.peak_memory_bytes - done.result
        assert held == pytest.approx(megabytes * 1e6, rel=0.1, abs=5e6)


def test_first_failure_is_told_from_those_that_follow():
    lost = WorkerHealthCheckFailedError("gone", RuntimeError("killed"))
    waiting, wrong = RuntimeError("Connection closed by peer"), ArithmeticError("not finite")
    bad = InputError(Fault("field", "value", "do this"))
    other = RuntimeError("other")
    for failures, first in (
        ([waiting, bad, wrong], bad),
        ([waiting, wrong], wrong),
        ([waiting, other], other),
    ):
        assert cause(WorkerGroupError("who and where", dict(enumerate(failures)))) is first
    assert wrong.__notes__ == ["Training failed due to worker errors:\nwho and where"]
    assert isinstance(cause(WorkerGroupError("", {0: waiting, 1: lost})), WorkerLost)
    assert isinstance(cause(WorkerGroupError("", {0: waiting})), WorkerLost)


class Rows(Dataset):
    """Row i is the same in every process."""

    def __len__(self):
        return CONFIG.steps * CONFIG.gradient_accumulation * CONFIG.batch_size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(2, 8, (LENGTH,), generator=generator)


# Without a balance loss: two workers count their tokens together, one counts each micro-batch.
def training_piece(
    *, out: Path, progress: Progress, model: Path, divided: Sharding = "none"
) -> dict:
    result = train(
        model,
        Rows(),
        out,
        config=CONFIG,
        seed=0,
        checkpoints=out.with_suffix(".checkpoints"),
        progress=progress,
        device="cpu",
        objective=MoEObjective(z_coefficient=0.01, watch_steps=2),
        divided=divided,
    )
    return {"curves": result.curves, "loss": result.final_loss}


def save_pico_mixtral(directory):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        sliding_window=None,
    )
    MixtralForCausalLM(config).save_pretrained(directory)
    return save_pico_tokenizer(directory)


@pytest.mark.faults
@pytest.mark.parametrize("divided", ["none", "full"])
def test_two_workers_train_as_one_that_accumulates(ray_of_two, tmp_path, divided):
    arguments = {"model": save_pico_mixtral(tmp_path / "model")}
    pieces = [
        Piece(name="alone", function=training_piece, arguments=arguments),
        Piece(
            name="together",
            function=training_piece,
            arguments={**arguments, "divided": divided},
            workers=2,
        ),
    ]
    results = run(tmp_path / "pieces", *pieces).values()
    alone, together = (
        [point["loss"] for point in done.result["curves"] if "loss" in point] for done in results
    )
    assert len(alone) == CONFIG.steps
    assert together == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0]
    expected, weights = (
        MixtralForCausalLM.from_pretrained(done.path, local_files_only=True).state_dict()
        for done in results
    )
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, atol=1e-4), name
