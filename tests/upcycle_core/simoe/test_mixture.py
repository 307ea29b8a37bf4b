"""What training makes of prompts that end alike: a mixture whose masks move to the end."""

import random

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


def test_it_finds_a_mixture_without_wind_up_whose_masks_move_to_the_end(tmp_path, monkeypatch):
    """Without the four words: 1.3 effective experts of 4, a lambda wound up at the first zero, and
    no mask that moves in the last fifth of the steps."""
    save_pico(tmp_path / "model")
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
    result = call(tmp_path / "mixed", config=config, simoe=MIXED, rows=rows)
    curves = [point for point in result.training.curves if "lambda" in point]
    first = next(point for point in curves if point["sparsity"] > 0)
    wound = MIXED.multiplier_learning_rate * MIXED.tau * first["step"]
    assert first["lambda"] < 0.25 * wound
    assert (zeros[128] != zeros[-1]).sum() > 100
    assert MIXED.tau <= result.sparsity_mean < MIXED.tau + 0.01
    model = load_causal_lm(tmp_path / "mixed" / "out")
    with torch.no_grad():
        prompts = torch.stack([rows[i]["input_ids"][:4] for i in range(40)])
        mean = model.coefficients(prompts).mean(0)
    assert torch.exp(-(mean * mean.log()).sum()) > 2
