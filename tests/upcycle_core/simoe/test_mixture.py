"""What training makes of prompts that end alike: a mixture whose masks move to the end."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.data import Dataset

from tests.pico import save_pico
from tests.upcycle_core.simoe.test_train_simoe import call
from tests.upcycle_core.training.runs import settings
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.simoe import objective
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import gated_modules


class TaskRows(Dataset):
    """Four tasks whose prompts end in the same token; each takes a letter to one of its own."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        task, letter = index % 4, 20 + random.Random(index).randrange(40)
        ids = torch.tensor([4 + task, letter, 10 + task, 3, letter + 1 + 7 * task, 0])
        labels = torch.where(torch.arange(6) < 4, -100, ids)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


MIXED = SimoeUpcyclingConfig(
    experts=4,
    mask_learning_rate=0.1,
    router_learning_rate=3e-3,
    multiplier_learning_rate=1.0,
    initial_spread=0.5,
    standardise=True,
    closing=0.5,
    reopen=True,
)


AS_PRINTED = replace(MIXED, initial_spread=0.05, standardise=False, closing=None, reopen=False)
"""Without the four words that are not in the paper."""


@dataclass
class Course:
    """What a training came to.

    Args:
        wound: lambda at the first zero, in what it is where it rises by all of tau until then.
        followed: The same, in what it is where it rises by all of the tau of each step.
        moved: Masks that were zero after four fifths of the steps, or at the end, and not both.
        sparsity: Share of zeros at the end.
        effective: Experts, of prompts of four tasks.
    """

    wound: float
    followed: float
    moved: int
    sparsity: float
    effective: float


def trained(folder, simoe, monkeypatch) -> Course:
    save_pico(folder.parent / "model")
    zeros, after = [], objective.SimoeObjective.after_step

    def watched(self, step):
        after(self, step)
        masks = [module.masks().detach() for module in gated_modules(self._model).values()]
        zeros.append(torch.cat([(z == 0).flatten() for z in masks]))

    monkeypatch.setattr(objective.SimoeObjective, "after_step", watched)
    config = settings(
        steps=160, batch_size=8, sequence_length=6, learning_rate=1e-2, checkpoint_steps=1000
    )
    rows = TaskRows(config.steps * config.batch_size)
    result = call(folder, config=config, simoe=simoe, rows=rows)
    curves = [point for point in result.training.curves if "lambda" in point]
    first = next(point for point in curves if point["sparsity"] > 0)
    model = load_causal_lm(folder / "out")
    with torch.no_grad():
        prompts = torch.stack([rows[i]["input_ids"][:4] for i in range(40)])
        mean = model.coefficients(prompts).mean(0)
    rises = first["lambda"] / (simoe.multiplier_learning_rate * simoe.tau)
    steps = range(1, int(first["step"]) + 1)
    ramp = (simoe.closing or 0) * config.steps
    return Course(
        wound=rises / len(steps),
        followed=rises / sum(min(1, step / ramp) if ramp else 1 for step in steps),
        moved=int((zeros[128] != zeros[-1]).sum()),
        sparsity=result.sparsity_mean,
        effective=float(torch.exp(-(mean * mean.log()).sum())),
    )


@pytest.mark.faults
def test_it_finds_a_mixture_without_wind_up_whose_masks_move_to_the_end(tmp_path, monkeypatch):
    course = trained(tmp_path / "run", MIXED, monkeypatch)
    assert course.effective > 2
    assert course.wound < 0.2
    assert course.followed < 0.9  # what is on its way is not asked for again
    assert course.moved > 100
    assert MIXED.tau <= course.sparsity < MIXED.tau + 0.01


@pytest.mark.faults
def test_as_printed_one_expert_wins_behind_a_lambda_wound_up_and_masks_stay(tmp_path, monkeypatch):
    """What the test above is there to keep away, on the same rows and steps."""
    course = trained(tmp_path / "run", AS_PRINTED, monkeypatch)
    assert course.effective < 1.6
    assert course.wound > 0.9
    assert course.moved == 0
