"""What the processes of ``benchmarks.training_step`` do: train, and write down how it went."""

import json
import os
import re
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.training.causal_trainer import CausalTrainer
from upcycle_core.training.config import MoEObjective, TrainingConfig
from upcycle_core.training.trainer import TrainingResult, train

EXPERTS = 4
VOCABULARY = 2048
WARM_UP = 2
"""Steps that are not counted: kernels and memory are found in them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One training.

    Args:
        model: Directory of the model below the benchmark's folder.
        precision: Arithmetic of forward and backward pass.
        experts: How experts run; ``None`` is what the library chooses.
        steps: Optimizer steps.
        batch_size: Rows a micro-batch.
        sequence_length: Tokens a row.
        accumulation: Micro-batches a step, over all workers.
        workers: Processes that share them.
        balance: Coefficient of the load-balancing loss.
        resumes: Whether it is then resumed from its first checkpoint.
        device: Where it computes.
    """

    model: str
    precision: Literal["fp32", "bf16"] = "fp32"
    experts: str | None = None
    steps: int
    batch_size: int
    sequence_length: int
    accumulation: int = 1
    workers: int = 1
    balance: float = 0.01
    resumes: bool = False
    device: str = "cpu"

    def saved(self, path: Path) -> Path:
        """Write it to ``path``."""
        path.write_text(json.dumps(asdict(self)))
        return path


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


def make_models(folder: Path, shape: dict[str, int]) -> None:
    """A dense model and its top-1 and top-2 MoE, random, with a tokenizer."""
    torch.manual_seed(0)
    shape = {**shape, "vocab_size": VOCABULARY}
    dense = LlamaForCausalLM(LlamaConfig.from_dict(shape))
    moe = MixtralForCausalLM(MixtralConfig.from_dict({**shape, "num_local_experts": EXPERTS}))
    with quiet_loading():
        dense.save_pretrained(folder / "dense")
        for k in (1, 2):
            moe.config.num_experts_per_tok = k
            moe.save_pretrained(folder / f"top-{k}")
    words = {f"w{index}": index for index in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    for path in folder.iterdir():
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0").save_pretrained(path)


def run(folder: Path, way: Way, found: Path) -> None:
    """Train ``way`` and write what it took to ``found``."""
    if way.workers > 1:
        torch.multiprocessing.spawn(_worker, (folder, way, found), nprocs=way.workers)
    else:
        found.write_text(json.dumps(measured(folder, way, found.with_suffix(""))))


def _worker(rank: int, folder: Path, way: Way, found: Path) -> None:
    """Train as one of several workers of this machine."""
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(way.workers),
        "RANK": str(rank),
        "WORLD_SIZE": str(way.workers),
    }
    place = f"file://{found.with_suffix('.meeting')}"
    torch.distributed.init_process_group("gloo", place, rank=rank, world_size=way.workers)
    if rank == 0:
        found.write_text(json.dumps(measured(folder, way, found.with_suffix(""))))
    else:  # nobody tells it of its steps
        _train(folder, way, found.with_suffix(""), StepTimes())
    torch.distributed.destroy_process_group()


def measured(folder: Path, way: Way, place: Path) -> dict[str, Any]:
    """Train in this process, with one thread.

    Returns:
        ``before_mb``, anonymous memory after the imports; ``gpu_mb``, the allocator's peak;
        ``step_s`` and ``step_cpu_s``, seconds of each step after the warm-up, on the clock and of
        CPU time; ``save_s``, of each checkpoint;
        ``start_s`` and ``resume_s``, from the call to the end of its first step; ``loss``, a curve.
    """
    before = _anonymous_mb()
    saves: list[float] = []
    times = StepTimes()
    with _saves_timed(saves), _experts_run(way.experts):
        called = time.perf_counter()
        result = _train(folder, way, place, times)
        facts = {
            "before_mb": before,
            "gpu_mb": torch.cuda.max_memory_allocated() / 1e6 if way.device != "cpu" else 0.0,
            "step_s": between(times.marks),
            "step_cpu_s": between(times.cpu_marks),
            "start_s": times.marks[1] - called,
            "save_s": list(saves),
            "loss": [point["loss"] for point in result.curves if "loss" in point],
        }
        if way.resumes:
            facts["resume_s"] = _resume(folder, way, place)
    return facts


def _train(folder: Path, way: Way, place: Path, times: StepTimes) -> TrainingResult:
    torch.set_num_threads(1)
    config = TrainingConfig(
        steps=way.steps,
        batch_size=way.batch_size,
        sequence_length=way.sequence_length,
        gradient_accumulation=way.accumulation,
        learning_rate=1e-3,
        warmup_steps=2,
        schedule="constant",
        precision=way.precision,
        checkpoint_steps=way.steps // 2 if way.resumes else way.steps,
        log_steps=1,
    )
    objective = MoEObjective(
        # One expert a token, its weight always 1: nothing moves the routers.
        trainable=("experts", "backbone") if way.model == "top-1" else ("all",),
        balance_coefficient=way.balance,
        z_coefficient=0.001,
    )
    return train(
        folder / way.model,
        Rows(way.steps * way.accumulation * way.batch_size, way.sequence_length),
        place / "trained",
        config=config,
        seed=0,
        checkpoints=place / "checkpoints",
        progress=times,
        device=way.device,
        objective=None if way.model == "dense" else objective,
    )


def _resume(folder: Path, way: Way, place: Path) -> float:
    """Seconds from the call to the end of the first step that is not repeated."""
    (place / "checkpoints" / f"checkpoint-{way.steps}" / "complete.json").unlink()
    times = StepTimes()
    called = time.perf_counter()
    _train(folder, way, place, times)
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


def _anonymous_mb() -> float:
    """Memory before the training: what imports cost."""
    status = Path("/proc/self/status").read_text()
    held = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(held.group(1)) / 1000 if held else 0.0
