"""AdamW with moments in bf16 beside PyTorch's own."""

import copy

import torch
from torch import nn

from tests.pico import save_pico
from tests.upcycle_core.training.runs import run, settings
from upcycle_core.training.moments import MOMENTS, NarrowAdamW

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _stepped(kind, steps):
    """A parameter after ``steps`` steps with seeded gradients, and its optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 8, generator=generator))
    optimizer = kind([parameter], fused=True, **OPTIONS)
    for _ in range(steps):
        parameter.grad = torch.randn(8, 8, generator=generator)
        optimizer.step()
    return parameter.detach(), optimizer


def test_the_first_step_is_adamws_and_later_ones_are_near():
    """Moments are rounded after a step: the first begins with zeros, which are exact."""
    assert torch.equal(_stepped(NarrowAdamW, 1)[0], _stepped(torch.optim.AdamW, 1)[0])
    narrow, wide = _stepped(NarrowAdamW, 20)[0], _stepped(torch.optim.AdamW, 20)[0]
    assert not torch.equal(narrow, wide)
    # 20 steps of at most 0.01; a moment is off by 1 / 256 at most, twenty times over.
    torch.testing.assert_close(narrow, wide, atol=2e-3, rtol=0)


def test_moments_are_bf16_after_loading_too():
    parameter, optimizer = _stepped(NarrowAdamW, 2)
    (state,) = optimizer.state.values()
    assert {state[name].dtype for name in MOMENTS} == {torch.bfloat16}
    again = NarrowAdamW([nn.Parameter(parameter)], fused=True, **OPTIONS)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (loaded,) = again.state.values()
    for name in MOMENTS:
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], state[name])


def test_a_recipe_asks_for_them(tmp_path):
    """The optimizer of a checkpoint has them, and a training goes on from it to the same bytes."""
    config = settings(steps=4, checkpoint_steps=2, optimizer_state="bf16")
    model = save_pico(tmp_path / "model")
    run(tmp_path, model, config=config)
    checkpoints = tmp_path / "out-checkpoints"
    saved = torch.load(checkpoints / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert {s[name].dtype for s in saved["state"].values() for name in MOMENTS} == {torch.bfloat16}
    whole = (tmp_path / "out" / "model.safetensors").read_bytes()
    (checkpoints / "checkpoint-4" / "complete.json").unlink()
    run(tmp_path, model, config=config)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole


def test_the_step_lies_where_the_weights_do_after_loading():
    """On a GPU a checkpoint is loaded to the CPU, and the fused step takes one device alone."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = NarrowAdamW([parameter], **OPTIONS)
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    elsewhere = NarrowAdamW([nn.Parameter(torch.empty(8, 8, device="meta"))], **OPTIONS)
    elsewhere.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (state,) = elsewhere.state.values()
    assert {tensor.device.type for tensor in state.values()} == {"meta"}
