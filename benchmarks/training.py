"""Trainings that are measured, each in a process of its own with one thread a worker."""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import upcycle_core.ders.model  # noqa: F401  (transformers knows DeRS then)
from benchmarks.children import call_in_child
from benchmarks.common import median, median_ratio
from benchmarks.models import EXPERTS, SHAPE, VOCABULARY, save_word_tokenizer
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.train import train_simoe
from upcycle_core.training.causal_trainer import CausalTrainer
from upcycle_core.training.config import MoEObjective, TrainingConfig
from upcycle_core.training.trainer import TrainingResult, train

Found = dict[str, Any]
DENSE = "dense"
"""The model that ``make_models`` writes and all others are made of."""
WARM_UP = 2
"""Steps that are not counted: kernels and memory are found in them."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training.

    Args:
        model: Directory of the model below the benchmark's folder.
        simoe: How it is upcycled in memory, if it is.
        rows: Text, or prompts with responses.
        precision: Arithmetic of forward and backward pass.
        experts: How experts run; ``None`` is what the library chooses.
        steps: Optimizer steps.
        log_steps: Steps between points of the loss curve.
        batch_size: Rows a micro-batch.
        sequence_length: Tokens a row.
        accumulation: Micro-batches a step, over all workers.
        workers: Processes that share them.
        balance: Coefficient of the load-balancing loss.
        resumes: Whether it is then resumed from its first checkpoint.
        device: Where it computes.
    """

    model: str
    simoe: SimoeUpcyclingConfig | None = None
    rows: Literal["text", "instructions"] = "text"
    precision: Literal["fp32", "bf16"] = "fp32"
    experts: str | None = None
    steps: int
    log_steps: int = 1
    batch_size: int
    sequence_length: int
    accumulation: int = 1
    workers: int = 1
    balance: float = 0.01
    resumes: bool = False
    device: str = "cpu"


def step_size(device: str) -> dict[str, Any]:
    """``batch_size`` and ``sequence_length`` that give a step enough work on ``device``."""
    if device == "cpu":
        return {"batch_size": 4, "sequence_length": 128}
    return {"batch_size": 64, "sequence_length": 256}  # more than its kernel launches


class Rows(Dataset):
    """Rows of a chain that can be learnt: nine tokens of ten follow from the one before."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randint(0, VOCABULARY, (self.length,), generator=generator).tolist()
        is_free = (torch.rand(self.length, generator=generator) < 0.1).tolist()
        ids = [drawn[0]]
        for token, free in zip(drawn[1:], is_free[1:], strict=True):
            ids.append(token if free else (5 * ids[-1] + 7) % VOCABULARY)
        return torch.tensor(ids)


class Instructions(Dataset):
    """Rows of the same chain: 60 to 85 % prompt, then the response, up to 10 % padding.

    Args:
        count: Rows.
        length: Tokens a row.
    """

    def __init__(self, count: int, length: int) -> None:
        self.rows, self.length = Rows(count, length), length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        prompt, end = (
            int(self.length * (low + span * torch.rand(1, generator=generator).item()))
            for low, span in ((0.6, 0.25), (0.9, 0.1))
        )
        ids = self.rows[index]
        labels, mask = ids.clone(), torch.ones_like(ids)
        labels[:prompt], labels[end:], ids[end:], mask[end:] = -100, -100, 0, 0
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class StepTimes:
    """Progress that notes when each step was over."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.cpu_marks: list[float] = []

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        self.marks, self.cpu_marks = [], []

    def advance(self, amount: int = 1, **shown: float) -> None:
        self.marks.append(time.perf_counter())
        self.cpu_marks.append(time.process_time())

    def metrics(self, values: Any, step: int) -> None: ...


def between(marks: list[float]) -> list[float]:
    """Seconds of each step after the warm-up. The first mark is the start."""
    return [after - before for before, after in pairwise(marks[WARM_UP + 1 :])]


def make_models(folder: Path) -> None:
    """A dense model and its top-1 and top-2 MoE, random, with a tokenizer."""
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig.from_dict(SHAPE))
    moe = MixtralForCausalLM(MixtralConfig.from_dict({**SHAPE, "num_local_experts": EXPERTS}))
    with quiet_loading():
        dense.save_pretrained(folder / DENSE)
        for k in (1, 2):
            moe.config.num_experts_per_tok = k
            moe.save_pretrained(folder / f"top-{k}")
    for path in folder.iterdir():
        save_word_tokenizer(path)


def train_in_child(folder: Path, training: Training) -> Found:
    """Train in a process of its own; what ``trained`` returns, and the memory that it took.

    Args:
        folder: Holds the models.
        training: What to do.
    """
    return call_in_child(trained, folder, training)


class Steps:
    """Seconds and CPU seconds of a step, each round's median, and median memory, by name."""

    def __init__(self, found: Mapping[str, Sequence[Found]]) -> None:
        self.seconds, self.cpu_seconds = (
            {name: [median(run[clock]) for run in runs] for name, runs in found.items()}
            for clock in ("step_s", "step_cpu_s")
        )
        self.memory = {n: median([run["memory_mb"] for run in runs]) for n, runs in found.items()}

    def beside(self, name: str, other: str) -> list[float]:
        """Milliseconds, their ratio to another's, that of CPU time, MB, their ratio."""
        clocks = (self.seconds, self.cpu_seconds)
        wall, cpu = (_ratio(clock[name], clock[other]) for clock in clocks)
        memory = self.memory[name]
        return [1000 * median(self.seconds[name]), wall, cpu, memory, memory / self.memory[other]]


def _ratio(over: list[float], under: list[float]) -> float:
    """Median over the rounds; what has one round is held against all the other's."""
    return median_ratio(over, under) if len(over) == len(under) else median(over) / median(under)


def trained(folder: Path, training: Training) -> Found:
    """Train, in this process or in several.

    Returns:
        ``step_s`` and ``step_cpu_s``, seconds of each step after the warm-up, on the clock and of
        CPU time; ``save_s``, of each checkpoint; ``start_s`` and ``resume_s``, from the call to the
        end of its first step; ``loss``, a curve.
    """
    with tempfile.TemporaryDirectory(prefix="training-") as place:
        if training.workers == 1:
            return _measured(folder, training, Path(place))
        arguments = (folder, training, Path(place))
        torch.multiprocessing.spawn(_worker, arguments, nprocs=training.workers)
        return json.loads(Path(place, "found.json").read_text())


def _worker(rank: int, folder: Path, training: Training, place: Path) -> None:
    """Train as one of several workers of this machine."""
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(training.workers),
        "RANK": str(rank),
        "WORLD_SIZE": str(training.workers),
    }
    meeting = f"file://{place / 'meeting'}"
    workers = training.workers
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=workers)
    if rank == 0:
        (place / "found.json").write_text(json.dumps(_measured(folder, training, place)))
    else:  # nobody tells it of its steps
        _train(folder, training, place, StepTimes())
    torch.distributed.destroy_process_group()


def _measured(folder: Path, training: Training, place: Path) -> Found:
    """Train in this process, with one thread; its files lie in ``place``."""
    saves: list[float] = []
    times = StepTimes()
    with _saves_timed(saves), _experts_run(training.experts):
        called = time.perf_counter()
        result = _train(folder, training, place, times)
        found = {
            "step_s": between(times.marks),
            "step_cpu_s": between(times.cpu_marks),
            "start_s": times.marks[1] - called,
            "save_s": list(saves),
            "loss": [point["loss"] for point in result.curves if "loss" in point],
        }
        if training.resumes:
            found["resume_s"] = _resume(folder, training, place)
    return found


def _train(folder: Path, training: Training, place: Path, times: StepTimes) -> TrainingResult:
    torch.set_num_threads(1)
    config = TrainingConfig(
        steps=training.steps,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        gradient_accumulation=training.accumulation,
        learning_rate=1e-3,
        warmup_steps=2,
        schedule="constant",
        precision=training.precision,
        checkpoint_steps=training.steps // 2 if training.resumes else training.steps,
        log_steps=training.log_steps,
    )
    kind = Instructions if training.rows == "instructions" else Rows
    count = training.steps * training.accumulation * training.batch_size
    arguments = folder / training.model, kind(count, training.sequence_length), place / "trained"
    how: dict[str, Any] = {
        "config": config,
        "seed": 0,
        "checkpoints": place / "checkpoints",
        "progress": times,
        "device": training.device,
    }
    if training.simoe is not None:
        return train_simoe(*arguments, simoe=training.simoe, **how).training
    objective = MoEObjective(
        # One expert a token, its weight always 1: nothing moves the routers.
        trainable=("experts", "backbone") if training.model == "top-1" else ("all",),
        balance_coefficient=training.balance,
        z_coefficient=0.001,
    )
    return train(*arguments, objective=None if training.model == DENSE else objective, **how)


def _resume(folder: Path, training: Training, place: Path) -> float:
    """Seconds from the call to the end of the first step that is not repeated."""
    (place / "checkpoints" / f"checkpoint-{training.steps}" / "complete.json").unlink()
    times = StepTimes()
    called = time.perf_counter()
    _train(folder, training, place, times)
    return times.marks[1] - called


def _saves_timed(seconds: list[float]) -> AbstractContextManager:
    """Every checkpoint, on the disk with its marker, adds what it took."""
    save = CausalTrainer._save_checkpoint

    def timed(*arguments: Any) -> None:
        started = time.perf_counter()
        save(*arguments)
        seconds.append(time.perf_counter() - started)

    return mock.patch.object(CausalTrainer, "_save_checkpoint", timed)


def _experts_run(experts: str | None) -> AbstractContextManager:
    """Let models that are loaded inside run their experts this way."""
    if experts is None:
        return nullcontext()
    where = "upcycle_core.checkpoints.load.choose_experts_implementation"
    return mock.patch(where, return_value=experts)
