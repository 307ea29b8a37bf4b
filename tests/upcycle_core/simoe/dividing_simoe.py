"""What workers that divide a SIMoE are asked to do."""

import os
import signal

import torch

from tests.upcycle_core.training.runs import AnswerRows
from upcycle_core.simoe.train import train_simoe


def tune(folder, model, name, *, config, rows=None, **options):
    """Train ``model`` into ``folder / name``, on the CPU."""
    count = config.steps * config.batch_size * config.gradient_accumulation
    return train_simoe(
        model,
        rows or AnswerRows(count),
        folder / name,
        config=config,
        seed=3,
        checkpoints=folder / f"{name}-checkpoints",
        device="cpu",
        **options,
    )


class DeadlyRows(AnswerRows):
    """The same rows; the worker that reads row ``deadly`` is killed."""

    def __init__(self, count: int, deadly: int) -> None:
        super().__init__(count)
        self.deadly = deadly

    def __getitem__(self, index):
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class TaskRows(AnswerRows):
    """The same rows, of two tasks by turns."""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"task_ids": torch.tensor(index % 2)}
