"""What routers see, against the model's own layers called one by one."""

import pytest
import torch
from torch import nn
from transformers import AutoModel, MixtralConfig

from tests.pico import pico_config
from upcycle_core.activations.capture import router_inputs

TOKENS = torch.arange(2 * 7).view(2, 7) % 96


@pytest.fixture(params=["llama", "qwen3", "mixtral"])
def model(request):
    torch.manual_seed(0)
    config = (
        MixtralConfig(**{**pico_config("mistral").to_dict(), "num_local_experts": 3})
        if request.param == "mixtral"
        else pico_config(request.param)
    )
    return AutoModel.from_config(config).eval()


def plain_router_inputs(model: nn.Module) -> list[torch.Tensor]:
    """The slow way: hidden states by layer, then each layer's first half written out."""
    states = model(input_ids=TOKENS, output_hidden_states=True, use_cache=False).hidden_states
    positions = torch.arange(TOKENS.shape[1])[None]
    rotary = model.rotary_emb(states[0], position_ids=positions)
    found = []
    for layer, x_BSH in zip(model.layers, states, strict=False):
        attended, _ = layer.self_attn(
            layer.input_layernorm(x_BSH), position_embeddings=rotary, attention_mask=None
        )
        found.append(layer.post_attention_layernorm(x_BSH + attended))
    return found


@torch.no_grad()
def test_every_layers_router_input_is_handed_over_in_one_forward(model):
    seen = []
    with router_inputs(model, lambda layer, x_BSH: seen.append((layer, x_BSH)), layers=[0, 1]):
        model(input_ids=TOKENS, use_cache=False)
    assert [layer for layer, _ in seen] == [0, 1]
    for (_, x_BSH), expected in zip(seen, plain_router_inputs(model), strict=True):
        torch.testing.assert_close(x_BSH, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_nothing_behind_the_last_watched_norm_is_computed(model):
    ran = []
    for index, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(f"mlp {index}"))
        layer.self_attn.register_forward_hook(lambda *_, index=index: ran.append(f"attn {index}"))
    model.norm.register_forward_hook(lambda *_: ran.append("norm"))
    with router_inputs(model, lambda *_: None, layers=[0, 1]):
        model(input_ids=TOKENS, use_cache=False)
    assert ran == ["attn 0", "mlp 0", "attn 1"]
    ran.clear()
    with router_inputs(model, lambda *_: None, layers=[0]):
        model(input_ids=TOKENS, use_cache=False)
    assert ran == ["attn 0"]


@torch.no_grad()
def test_the_model_is_whole_again_afterwards(model):
    before = model(input_ids=TOKENS, use_cache=False).last_hidden_state
    names = [name for name, _ in model.named_modules()]
    seen = []
    with router_inputs(model, lambda *_: seen.append(1), layers=[0]):
        model(input_ids=TOKENS, use_cache=False)
    with pytest.raises(IndexError), router_inputs(model, lambda *_: None, layers=[0]):
        model(input_ids=torch.tensor([[10**6]]), use_cache=False)
    assert torch.equal(model(input_ids=TOKENS, use_cache=False).last_hidden_state, before)
    assert [name for name, _ in model.named_modules()] == names
    assert len(seen) == 1
