"""What a DeRS model cannot be trained with, held against the gradients that its routers get."""

import itertools

import pytest
import torch

from tests.pico import pico_config
from upcycle_core.ders.model import DersConfig, DersForCausalLM
from upcycle_core.training.checks import routing_faults
from upcycle_core.training.config import MoEObjective

CHOICES = list(itertools.product(("sum", "normalised"), ("none", "own", "delta")))


def shape(combine="normalised", universal="none", top_k=1) -> DersConfig:
    return DersConfig(
        dense=pico_config(num_hidden_layers=1),
        num_experts=3,
        num_experts_per_tok=top_k,
        combine=combine,
        universal=universal,
    )


def faults(config, *trainable):
    objective = MoEObjective(trainable=trainable) if trainable else None
    return [str(fault) for fault in routing_faults(config, objective)]


def router_learns(config) -> bool:
    torch.manual_seed(0)
    model = DersForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    ids = torch.arange(2, 22).view(2, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    # p / p is 1 up to rounding, and so is what comes back through it 0.
    return bool(model.model.decoder.layers[0].mlp.gate.weight.grad.abs().max() > 1e-5)


@pytest.mark.parametrize(("combine", "universal"), CHOICES)
@pytest.mark.parametrize("top_k", [1, 2])
def test_training_the_routers_is_refused_where_they_get_no_gradient(combine, universal, top_k):
    config = shape(combine, universal, top_k)
    for trainable in ((), ("all",), ("router", "shared_base")):
        found = faults(config, *trainable)
        assert len(found) == (not router_learns(config))
        assert all("no gradient" in text and "top_k >= 2" in text for text in found)
    assert not faults(config, "experts", "shared_base", "backbone")


@pytest.mark.parametrize("group", ["router", "experts", "expert_gates", "shared_base"])
def test_a_group_of_a_moe_is_refused_for_a_dense_model(group):
    assert not faults(shape(top_k=2), group)
    (text,) = faults(pico_config(), "backbone", group)
    assert text.startswith(f"objective.trainable = {group!r}: the model is dense")


def test_what_a_dense_model_has_is_not_refused():
    assert not faults(pico_config(), "backbone", "all")
