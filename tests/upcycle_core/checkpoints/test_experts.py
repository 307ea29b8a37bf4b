"""Experts under autocast: in its type, and nearly what fp32 gives."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.pico import pico_config
from upcycle_core.checkpoints.experts import NAME, register
from upcycle_core.checkpoints.load import choose_experts_implementation


def mixtral(way):
    values = {**pico_config().to_dict(), "num_local_experts": 4, "num_experts_per_tok": 2}
    values = {k: v for k, v in values.items() if k not in ("model_type", "architectures")}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MixtralConfig(**values), experts_implementation=way)


def stepped(way, monkeypatch, *, autocast):
    """Loss and gradients, and the types that grouped products are of."""
    model, types = mixtral(way), []
    real = torch.nn.functional.grouped_mm

    def watched(a, b, **options):
        types.append((a.dtype, b.dtype))
        return real(a, b, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    ids = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}, set(types)


def test_experts_are_multiplied_in_the_type_of_autocast(monkeypatch):
    loss, gradients, types = stepped(register(), monkeypatch, autocast=True)
    assert types == {(torch.bfloat16, torch.bfloat16)}
    _, _, stock = stepped("grouped_mm", monkeypatch, autocast=True)
    assert stock == {(torch.float32, torch.float32)}
    exact, expected, _ = stepped("eager", monkeypatch, autocast=False)
    assert loss == pytest.approx(exact, rel=2e-3)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        apart = (gradient - expected[name]).norm() / expected[name].norm()
        assert apart < 0.05, name


def test_without_autocast_it_is_the_stock_product(monkeypatch):
    found, expected = (
        stepped(way, monkeypatch, autocast=False) for way in (register(), "grouped_mm")
    )
    assert found[0] == expected[0]
    assert all(torch.equal(own, expected[1][name]) for name, own in found[1].items())


@pytest.mark.parametrize(
    ("device", "precision", "way"),
    [("cpu", "bf16", "grouped_mm"), ("cuda", "fp32", "grouped_mm"), ("cuda:0", "bf16", NAME)],
)
def test_a_gpu_trains_experts_in_bf16_by_it(device, precision, way):
    assert choose_experts_implementation(device, precision, training=True) == way
