"""What a checkpoint's size is, from its headers or from config.json alone."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import CONFIGS, pico_config, save_pico
from upcycle_core.errors import InputError
from upcycle_core.planning.memory import weights_held
from upcycle_core.planning.shape import Shape


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_headers_and_configuration_say_the_same(tmp_path, family, tied):
    config = pico_config(family, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    whole, bare = Shape.of(tmp_path / "whole"), Shape.of(tmp_path / "bare")
    for name in ("whole", "ffns", "ends", "largest", "itemsize", "layers", "hidden", "vocabulary"):
        assert getattr(whole, name) == getattr(bare, name), name
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert bare.whole == sum(sizes.values())
    assert bare.ffns == sum(size for name, size in sizes.items() if ".mlp." in name)
    assert bare.itemsize == 2


def test_buffers_that_are_computed_anew_are_no_weights(tmp_path):
    """Older Llamas have theirs in fp32 beside weights in bf16."""
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(pico_config(), dtype=torch.bfloat16).save_pretrained(model)
    plain, place = Shape.of(model), model / "model.safetensors"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**load_file(place), name: torch.ones(4)}, place, metadata={"format": "pt"})
    assert Shape.of(model) == plain
    assert plain.dtype == torch.bfloat16


def test_a_mixture_has_the_ffns_once_an_expert_and_routers(tmp_path):
    shape = Shape.of_config(pico_config().to_dict(), 4)
    assert shape.mixture(3) == shape.whole + 2 * shape.ffns + 2 * 3 * 32
    assert shape.ffns == 2 * 3 * 32 * 48


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"model = .*has no config\.json; give the directory"):
        Shape.of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InputError, match="gpt2"):
        Shape.of(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "is no object of attributes; fetch it again"),
        (b'"llama"', "is no object of attributes; fetch it again"),
        (b"null", "is no object of attributes; fetch it again"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
    ids=["list", "text", "null", "cut", "bytes", "deep"],
)
def test_a_configuration_that_is_none_is_said(tmp_path, content, said):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        Shape.of(tmp_path)
    assert f"model = '{file}': {said}" in str(error.value)


@pytest.mark.parametrize(("dtype", "held"), [("bfloat16", 0), ("float16", 2), ("float32", 2)])
def test_weights_of_another_type_are_held_though_they_are_as_wide(tmp_path, dtype, held):
    model = AutoModelForCausalLM.from_pretrained(save_pico(tmp_path / "model"))
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "model")
    for shape in (Shape.of(tmp_path / "model"), shape_of_config(tmp_path / "model")):
        assert weights_held(shape, "bf16", "cpu") == held * shape.whole


def shape_of_config(model):
    (model / "model.safetensors").unlink()
    return Shape.of(model)
