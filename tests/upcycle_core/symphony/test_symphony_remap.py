"""Neurons in another order: tensors by hand, logits as they were."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pico import pico_config
from tests.upcycle_core.backbone.rewritten import (
    IDS,
    VARIANTS,
    difference,
    pico_reader,
    random_order,
    rewritten,
)
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.symphony.assignment import permute_neurons

ORDERS = {layer: random_order(48, seed=layer) for layer in (0, 1)}


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_permuted_model_computes_what_it_computed(tmp_path, family, overrides, tied):
    reader = pico_reader(tmp_path / "model", family, tie_word_embeddings=tied, **overrides)
    permute = permute_neurons(FAMILIES[family], ORDERS)
    permuted = rewritten(reader, tmp_path / "permuted", [permute])
    assert difference(reader, permuted) <= 1e-5
    assert permuted.config == reader.config
    changed = {n for n in reader.tensors if not torch.equal(reader.tensor(n), permuted.tensor(n))}
    assert changed == {name for name in reader.tensors if ".mlp." in name}


def test_place_i_gets_the_neuron_that_the_order_names(tmp_path):
    reader = pico_reader(tmp_path / "model", "llama")
    permute = permute_neurons(FAMILIES["llama"], {1: ORDERS[1]})
    gate, up, down = FAMILIES["llama"].ffn(1)
    for place, neuron in enumerate(ORDERS[1].tolist()):
        for name in (gate, up):
            assert torch.equal(
                permute(name, reader.tensor(name))[place], reader.tensor(name)[neuron]
            )
        assert torch.equal(
            permute(down, reader.tensor(down))[:, place], reader.tensor(down)[:, neuron]
        )
    other = FAMILIES["llama"].ffn(0).gate
    assert torch.equal(permute(other, reader.tensor(other)), reader.tensor(other))


@torch.no_grad()
def test_biases_of_a_family_that_has_them_go_along():
    prefix = "model.layers.{layer}.mlp."
    biases = {
        f"{prefix}{part}_proj.bias": axis
        for part, axis in zip(("gate", "up", "down"), "IIH", strict=True)
    }
    llama = FAMILIES["llama"]
    family = replace(llama, layer_tensors={**llama.layer_tensors, **biases})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(pico_config(mlp_bias=True)).eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
    before = model(input_ids=IDS).logits
    permute = permute_neurons(family, ORDERS)
    state = {name: permute(name, tensor) for name, tensor in model.state_dict().items()}
    bias = "model.layers.0.mlp.up_proj.bias"
    assert not torch.equal(state[bias], model.state_dict()[bias])
    model.load_state_dict(state)
    assert (model(input_ids=IDS).logits - before).abs().max() <= 1e-5


def test_an_order_that_loses_a_neuron_is_refused():
    with pytest.raises(ValueError, match="layer 4: the order of its neurons is no permutation"):
        permute_neurons(FAMILIES["llama"], {4: torch.tensor([0, 0, 1])})
