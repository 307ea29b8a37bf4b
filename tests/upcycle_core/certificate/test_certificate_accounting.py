"""Where readers put tensors, and which of them are lost or in another's place."""

import pytest
import torch

from infra.readers.ask.arrived import places, wanted
from upcycle_core.certificate.accounting import misplaced

LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 3, 5, 4
MOE = "model.layers.{}.moe.experts.{}.{}.weight"


def checkpoint():
    """Name to random tensor: experts apart, as files have them."""
    torch.manual_seed(0)
    tensors = {"model.embed.weight": torch.randn(7, HIDDEN), "model.norm.weight": torch.randn(4)}
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.gate.weight"] = torch.randn(EXPERTS, HIDDEN)
        for part in ("q", "k"):
            tensors[f"model.layers.{layer}.{part}.bias"] = torch.randn(HIDDEN)
        for expert in range(EXPERTS):
            for part in ("w1", "w3"):
                tensors[MOE.format(layer, expert, part)] = torch.randn(WIDTH, HIDDEN)
    return tensors


def loaded(tensors):
    """What a reader makes of them: experts in one tensor, gate over up, query over key."""
    model = {n: t.clone() for n, t in tensors.items() if "layers" not in n}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        model[f"{start}.gate.weight"] = tensors[f"{start}.gate.weight"].clone()
        model[f"{start}.qk.bias"] = torch.cat([tensors[f"{start}.{p}.bias"] for p in "qk"])
        pairs = [
            torch.cat([tensors[MOE.format(layer, e, part)] for part in ("w1", "w3")])
            for e in range(EXPERTS)
        ]
        model[f"{start}.moe.w13"] = torch.stack(pairs)
    return model


def lost(tensors, model):
    found, unknown = places(model.items(), {name: wanted(t) for name, t in tensors.items()})
    return misplaced(found), unknown


def test_a_model_that_a_reader_stacks_its_own_way_is_whole():
    tensors = checkpoint()
    assert lost(tensors, loaded(tensors)) == ({}, [])


def exchange(model, tensors):
    model["model.layers.1.moe.w13"] = model["model.layers.1.moe.w13"][[1, 0, 2]]
    return {MOE.format(1, expert, part) for expert in (0, 1) for part in ("w1", "w3")}


def overwrite(model, tensors):
    model["model.layers.0.moe.w13"][2, :WIDTH] = torch.randn(WIDTH, HIDDEN)
    return {MOE.format(0, 2, "w1")}


def swap_gate_and_up(model, tensors):
    model["model.layers.0.moe.w13"][1] = model["model.layers.0.moe.w13"][1].roll(WIDTH, 0)
    return {MOE.format(0, 1, part) for part in ("w1", "w3")}


def permute_router(model, tensors):
    model["model.layers.1.gate.weight"] = model["model.layers.1.gate.weight"].flip(0)
    return {"model.layers.1.gate.weight"}


def other_layer(model, tensors):
    a, b = "model.layers.0.qk.bias", "model.layers.1.qk.bias"
    model[a], model[b] = model[b], model[a]
    return {f"model.layers.{layer}.{part}.bias" for layer in (0, 1) for part in "qk"}


def drop(model, tensors):
    del model["model.norm.weight"]
    return {"model.norm.weight"}


@pytest.mark.parametrize(
    "damage", [exchange, overwrite, swap_gate_and_up, permute_router, other_layer, drop]
)
def test_what_is_not_in_its_place_is_named(damage):
    tensors = checkpoint()
    model = loaded(tensors)
    expected = damage(model, tensors)
    assert set(lost(tensors, model)[0]) == expected


def test_what_was_never_in_the_checkpoint_is_told():
    tensors = checkpoint()
    model = loaded(tensors) | {"model.layers.0.new": torch.randn(3, HIDDEN)}
    assert lost(tensors, model) == ({}, ["model.layers.0.new"])


def test_equal_tensors_are_each_in_their_own_place():
    tensors = {f"model.layers.{i}.norm.weight": torch.ones(HIDDEN) for i in range(3)}
    assert lost(tensors, {n: t.clone() for n, t in tensors.items()}) == ({}, [])
    assert set(lost(tensors, {n: t for n, t in tensors.items() if "1" not in n})[0]) == {
        "model.layers.1.norm.weight"
    }


def test_bf16_tensors_are_found_in_a_model_in_fp32():
    tensors = {n: t.bfloat16() for n, t in checkpoint().items()}
    assert lost(tensors, {n: t.float() for n, t in loaded(tensors).items()}) == ({}, [])
