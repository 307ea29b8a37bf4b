"""A decoder layer by layer is the decoder: bit for bit, of every family."""

import pytest
import torch
from transformers import AutoModel

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from upcycle_core.activations.stream import LayerStream
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader

WINDOWS = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen2 with windows", "mistral with a window"])
def test_layers_in_turn_are_the_model(family, dtype, tmp_path):
    name, _, windows = family.partition(" with ")
    more = {"windows": WINDOWS, "a window": {"sliding_window": 4}}.get(windows, {})
    checkpoint = save_pico(tmp_path / "model", name, **more)
    whole = AutoModel.from_pretrained(checkpoint, dtype=dtype).eval()
    batches = [torch.randint(3, 60, (2, 9)), torch.randint(3, 60, (1, 5))]
    stream = LayerStream(checkpoint, CheckpointReader(checkpoint).tensor, dtype=dtype)
    passing = stream.start(batches)
    for index in range(whole.config.num_hidden_layers):
        with stream.layer(index):
            for batch in passing:
                batch.hidden_BSH = stream.through(batch)
    for ids, batch in zip(batches, passing, strict=True):
        with torch.inference_mode():
            expected = whole(ids, use_cache=False).last_hidden_state
            assert torch.equal(whole.norm(batch.hidden_BSH), expected)


def test_a_layer_holds_weights_while_it_is_used(tmp_path):
    checkpoint = save_pico(tmp_path / "model")
    stream = LayerStream(checkpoint, CheckpointReader(checkpoint).tensor, dtype=torch.float32)
    stream.start([torch.tensor([[3, 4, 5]])])
    with stream.layer(1):
        assert {p.device.type for p in stream.model.layers[1].parameters()} == {"cpu"}
        assert {p.device.type for p in stream.model.layers[0].parameters()} == {"meta"}
    assert {p.device.type for p in stream.model.parameters()} == {"meta"}


def test_a_layer_s_experts_lie_where_those_of_the_one_before_lay(tmp_path):
    """Freed and allocated anew they would not fit, and each layer would take more memory."""
    moe = join(tmp_path / "moe").model
    whole = load_causal_lm(moe).model.layers
    stream = LayerStream(moe, None, dtype=torch.float32)
    places = set()
    for index in range(stream.layers):
        with stream.layer(index) as layer:
            for name, parameter in whole[index].named_parameters():
                assert torch.equal(layer.get_parameter(name), parameter), name
            experts = layer.mlp.experts
            places.add((experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr()))
    assert len(places) == 1
