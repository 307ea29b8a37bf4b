import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError


def edit_weights(directory, edit) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_model_is_the_stock_one(tmp_path, tied):
    save_pico(tmp_path, tie_word_embeddings=tied)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=ids).logits
        model = load_causal_lm(tmp_path)
        assert not model.training
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert load_causal_lm(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_every_tensor_that_does_not_fit_is_named(tmp_path):
    save_pico(tmp_path)

    def spoil(weights):
        del weights["model.norm.weight"]
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        weights["lm_head.weight"] = torch.zeros(96, 31)

    edit_weights(tmp_path, spoil)
    with pytest.raises(InputError) as caught:
        load_causal_lm(tmp_path)
    message = str(caught.value)
    assert "missing tensors: model.norm.weight" in message
    assert "unexpected tensors: model.layers.0.self_attn.q_proj.bias" in message
    assert "mismatched tensors" in message
    assert "lm_head.weight" in message


def test_a_tied_head_that_differs_on_disk_is_refused(tmp_path):
    save_pico(tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": torch.ones(96, 32)}))
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    with pytest.raises(InputError, match="ties lm_head"):
        load_causal_lm(tmp_path)


def test_loading_prints_nothing(tmp_path, capfd):
    save_pico(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.pop("model.norm.weight"))
    capfd.readouterr()
    with pytest.raises(InputError):
        load_causal_lm(tmp_path)
    assert capfd.readouterr() == ("", "")
