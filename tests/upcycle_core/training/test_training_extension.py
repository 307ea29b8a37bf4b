"""What an extension adds to a training: losses, groups, clipping, state, and what may be kept."""

import json

import pytest
import torch

from tests.pico import save_pico
from tests.upcycle_core.training.runs import AnswerRows, RandomRows, settings
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Silent
from upcycle_core.training.arguments import checked_shape
from upcycle_core.training.extension import ParameterGroup
from upcycle_core.training.groups import Trainable
from upcycle_core.training.resume import kept_step, training_record
from upcycle_core.training.trainer import Subject, train_subject

PULLED = "model.layers.1.mlp.down_proj.weight"


class Pull:
    """Adds ``factor`` times the sum of one tensor to the loss, and counts its steps."""

    def __init__(self, model, factor=0.0, last_kept=99):
        self.parameters = dict(model.named_parameters())
        self.factor, self.last_kept, self.steps = factor, last_kept, []

    def penalty(self):
        return self.factor * self.parameters[PULLED].sum()

    def groups(self):
        one = ParameterGroup(
            names=frozenset({PULLED}), learning_rate=0.5, decays=False, clipped_apart=True
        )
        return [ParameterGroup(names=frozenset(self.parameters) - one.names), one]

    def after_step(self, step):
        self.steps.append(step)

    def point(self):
        return {"counted": float(len(self.steps))}

    def state(self):
        return {"steps": self.steps}

    def load_state(self, state):
        self.steps = list(state["steps"])

    def may_keep(self, point):
        return point["counted"] <= self.last_kept

    def nothing_to_keep(self, point):
        return InputError(Fault("pull", point["counted"], "too much"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_pico(tmp_path_factory.mktemp("model"))


def pull(folder, model, *, config, rows=None, **options):
    """(result, extension) of a training with ``Pull``."""
    made = []

    def load(device):
        network = load_causal_lm(model, device=device, training=True)
        extension = Pull(network, **options)
        made.append(extension)
        return Subject(network, Trainable(1, 1, frozenset()), lambda: None, extension)

    rows = rows or RandomRows(config.steps * config.batch_size * config.gradient_accumulation)
    result = train_subject(
        load,
        rows,
        shape=checked_shape(model, rows, None, config, None),
        config=config,
        record=training_record(config, 0, None, {}, {"of": "pull"}),
        seed=0,
        checkpoints=folder / "checkpoints",
        progress=Silent(),
        device="cpu",
    )
    return result, made[0]


@pytest.mark.parametrize("kind", [RandomRows, AnswerRows])
def test_a_penalty_counts_once_a_step_and_is_no_part_of_the_text_s_loss(
    tmp_path, model, monkeypatch, kind
):
    gradients = []

    def keep(optimizer, closure=None):
        gradients.append(optimizer.param_groups[-1]["params"][0].grad.clone())

    monkeypatch.setattr(torch.optim.AdamW, "step", keep)
    config = settings(steps=1, gradient_accumulation=3, max_gradient_norm=1e9)
    losses = []
    for factor in (0.0, 7.0):
        folder = tmp_path / str(factor)
        result, _ = pull(folder, model, config=config, rows=kind(6), factor=factor)
        losses.append(result.curves[0]["loss"])
    difference = gradients[1] - gradients[0]
    torch.testing.assert_close(difference, torch.full_like(difference, 7.0), atol=1e-4, rtol=0)
    assert losses[0] == losses[1]


def test_groups_have_learning_rates_decay_and_norms_of_their_own(tmp_path, model):
    config = settings(steps=2, max_gradient_norm=1.0, weight_decay=0.1)
    result, _ = pull(tmp_path / "weak", model, config=config)
    pulled, _ = pull(tmp_path / "strong", model, config=config, factor=1e6)
    # The first gradient of all others is the same, and so is its norm.
    assert pulled.curves[0]["gradient_norm"] == result.curves[0]["gradient_norm"]
    saved = torch.load(tmp_path / "strong" / "checkpoints" / "checkpoint-2" / "optimizer.pt")
    groups = [(g["lr"], g["weight_decay"], len(g["params"])) for g in saved["param_groups"]]
    assert groups[-1] == (0.5, 0.0, 1)
    assert {group[:2] for group in groups[:-1]} == {(3e-3, 0.1), (3e-3, 0.0)}
    moment = saved["state"][saved["param_groups"][-1]["params"][0]]["exp_avg_sq"]
    assert moment.sum().sqrt() < 1  # clipped to norm one before the optimizer saw it


def test_its_state_lies_in_the_checkpoint_and_comes_back(tmp_path, model):
    config = settings(steps=6, checkpoint_steps=3)
    pull(tmp_path, model, config=config)
    last = tmp_path / "checkpoints" / "checkpoint-6"
    assert json.loads((last / "extension.json").read_text()) == {"steps": [1, 2, 3, 4, 5, 6]}
    (last / "complete.json").unlink()  # as after a kill
    result, extension = pull(tmp_path, model, config=config)
    assert extension.steps == [1, 2, 3, 4, 5, 6]
    assert [point["counted"] for point in result.curves if "loss" in point] == [1, 2, 3, 4, 5, 6]


def test_the_newest_checkpoint_that_may_be_kept_stays(tmp_path, model):
    config = settings(steps=9, checkpoint_steps=2)
    pull(tmp_path, model, config=config, last_kept=5)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["checkpoint-4", "checkpoint-8", "checkpoint-9"]
    with pytest.raises(InputError, match="too much"):
        pull(tmp_path / "none", model, config=config, last_kept=0)
    assert len(list((tmp_path / "none" / "checkpoints").iterdir())) == 2


def test_the_kept_step_is_the_last_or_the_best_of_those_that_have_a_checkpoint():
    points = [
        {"step": 2, "loss": 1.0, "counted": 2},
        {"step": 2, "validation_loss": 0.5},
        {"step": 3, "loss": 1.0, "counted": 3},
        {"step": 4, "loss": 1.0, "counted": 4},
        {"step": 4, "validation_loss": 0.3},
        {"step": 5, "loss": 1.0, "counted": 5},
        {"step": 5, "validation_loss": 0.1},
        {"step": 5, "train_loss": 1.0},
    ]
    only = Pull(torch.nn.Module(), last_kept=4)
    last = settings(steps=5, checkpoint_steps=2)
    best = settings(steps=5, checkpoint_steps=2, evaluation_steps=2, keep="best")
    assert [kept_step(points, last), kept_step(points, last, only)] == [5, 4]
    assert [kept_step(points, best), kept_step(points, best, only)] == [5, 4]
    only.last_kept = 3
    assert kept_step(points, best, only) == 2
    assert kept_step(points, last, only) == 2  # step 3 has no checkpoint
    only.last_kept = 1
    assert kept_step(points, last, only) is None
