"""What the processes of ``benchmarks.simoe_step`` do: train, and write down how it went."""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.training_run import Rows, StepTimes, between
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.train import train_simoe
from upcycle_core.training.config import MoEObjective, TrainingConfig
from upcycle_core.training.trainer import train

FULL, UPCYCLING, SIMOE = METHODS = "full finetuning", "sparse upcycling", "SIMoE"
PARAMETERS = f"{SIMOE}, parameter masks"
SETTINGS = {
    SIMOE: SimoeUpcyclingConfig(multiplier_learning_rate=1.0),
    PARAMETERS: SimoeUpcyclingConfig(masks="parameters", multiplier_learning_rate=1.0),
}
MASK_TRAVEL = 8.0
"""How far log phi may come in a training; 3 closes a mask."""
LOG_STEPS = 10
"""As training has it by default."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One training.

    Args:
        method: Which.
        steps: Optimizer steps.
        batch_size: Rows a step.
        sequence_length: Tokens a row.
        precision: Arithmetic of forward and backward pass.
        device: Where it computes.
    """

    method: str
    steps: int
    batch_size: int
    sequence_length: int
    precision: Literal["fp32", "bf16"]
    device: str

    def saved(self, path: Path) -> Path:
        """Write it to ``path``."""
        path.write_text(json.dumps(asdict(self)))
        return path


class Instructions(Dataset):
    """Rows of a chain that can be learnt: 60 to 85 % prompt, then the response, up to 10 % padding.

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


class StepCurve(StepTimes):
    """Progress that keeps the losses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def metrics(self, values: Any, step: int) -> None:
        self.losses.append(values["loss"])


def trained(folder: Path, way: Way, file: Path) -> dict[str, Any]:
    """Train in this process.

    Returns:
        ``before_mb``, anonymous memory after the imports; ``gpu_mb``, the allocator's peak;
        ``step_s`` and ``step_cpu_s``, of each step after the warm-up; ``loss``, a curve.
    """
    before, times = anonymous_mb(), StepCurve()
    config = TrainingConfig(
        steps=way.steps,
        batch_size=way.batch_size,
        sequence_length=way.sequence_length,
        learning_rate=1e-3,
        warmup_steps=2,
        schedule="constant",
        precision=way.precision,
        checkpoint_steps=way.steps,
        log_steps=LOG_STEPS,
    )
    rows = Instructions(way.steps * way.batch_size, way.sequence_length)
    place = {"out": file.parent / "trained", "checkpoints": file.parent / "checkpoints"}
    how: Any = {"config": config, "seed": 0, "progress": times, "device": way.device, **place}
    if way.method in SETTINGS:
        # Fast enough to make masks sparse in so few steps, so that every part of the step has work.
        simoe = replace(SETTINGS[way.method], mask_learning_rate=MASK_TRAVEL / way.steps)
        train_simoe(folder / "dense", rows, simoe=simoe, **how)
    elif way.method == UPCYCLING:
        objective = MoEObjective(balance_coefficient=0.01, z_coefficient=0.001)
        train(folder / "upcycled", rows, objective=objective, **how)
    else:
        train(folder / "dense", rows, **how)
    return {
        "before_mb": before,
        "gpu_mb": torch.cuda.max_memory_allocated() / 1e6 if way.device != "cpu" else 0.0,
        "step_s": between(times.marks),
        "step_cpu_s": between(times.cpu_marks),
        "loss": times.losses,
    }


def anonymous_mb() -> float:
    """Memory of this process that no file backs."""
    held = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(held.group(1)) / 1000 if held else 0.0
