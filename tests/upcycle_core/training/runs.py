"""Short trainings for tests."""

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from tests.pico import VOCABULARY
from upcycle_core.progress import Silent
from upcycle_core.training.config import TrainingConfig
from upcycle_core.training.trainer import train

LENGTH = 16


class RandomRows(Dataset):
    """Row i is random tokens that depend on i and ``salt`` alone."""

    def __init__(self, count, salt=0):
        self.count, self.salt = count, salt

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.salt + index)
        return torch.randint(VOCABULARY, (LENGTH,), generator=generator)


class AnswerRows(RandomRows):
    """Random rows: padding at the end, and loss on the last tokens before it alone."""

    def __getitem__(self, index):
        ids = super().__getitem__(index)
        labels, mask = ids.clone(), torch.ones_like(ids)
        padding = index % 4
        labels[: LENGTH - padding - 2 - index % 7] = -100
        if padding:
            ids[-padding:], labels[-padding:], mask[-padding:] = 1, -100, 0
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class Recorder(Silent):
    """Keeps what was reported."""

    def __init__(self):
        self.points = []

    def metrics(self, values, step):
        self.points.append({"step": step, **values})


def settings(**changes):
    base = {
        "steps": 6,
        "batch_size": 2,
        "sequence_length": LENGTH,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
        "schedule": "constant",
        "precision": "fp32",
        "checkpoint_steps": 100,
        "log_steps": 1,
    }
    return TrainingConfig(**{**base, **changes})


def run(folder, model, name="out", *, config=None, rows=None, seed=0, progress=None, **options):
    """Train ``model`` into ``folder / name``; on the CPU, if no ``device`` is named."""
    config = config or settings()
    needed = config.steps * config.batch_size * config.gradient_accumulation
    return train(
        model,
        rows or RandomRows(needed),
        folder / name,
        config=config,
        seed=seed,
        checkpoints=folder / f"{name}-checkpoints",
        progress=progress or Silent(),
        **{"device": "cpu", **options},
    )


def weights(directory):
    """Parameters of a checkpoint, by name."""
    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
