from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
)

from tests.pico import save_pico_tokenizer
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.resolve import stock_faults
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.training.config import LlamaShape
from upcycle_core.training.seed import initialise_model

SHAPE = LlamaShape(
    hidden_size=32,
    intermediate_size=48,
    layers=3,
    attention_heads=4,
    key_value_heads=2,
    max_positions=64,
    rope_theta=5000.0,
)


@pytest.fixture
def tokenizer(tmp_path):
    return save_pico_tokenizer(tmp_path / "tokenizer")


def test_the_seed_has_the_shape_that_was_asked_for(tmp_path, tokenizer):
    initialise_model(SHAPE, tokenizer, tmp_path / "seed", seed=0)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "seed", output_loading_info=True)
    assert not any(found.values())
    words = AutoTokenizer.from_pretrained(tmp_path / "seed")
    config = model.config
    assert words("abc").input_ids == AutoTokenizer.from_pretrained(tokenizer)("abc").input_ids
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight.shape == (len(words), 32)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.model.layers[2].mlp.gate_proj.weight.shape == (48, 32)
    assert model.model.layers[2].self_attn.k_proj.weight.shape == (2 * 8, 32)
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.max_position_embeddings == 64
    assert config.eos_token_id == words.eos_token_id
    assert config.pad_token_id == words.pad_token_id


def test_a_llama_is_what_the_stock_class_draws_from_the_seed(tmp_path, tokenizer):
    initialise_model(SHAPE, tokenizer, tmp_path / "seed", seed=7)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = LlamaForCausalLM(config).state_dict()
    expected.pop("lm_head.weight")
    reader = CheckpointReader(tmp_path / "seed")
    assert set(reader.tensors) == set(expected)
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in expected.items())


def test_a_qwen2_is_the_stock_one_with_biases_and_no_window(tmp_path, tokenizer):
    shape = replace(SHAPE, family="qwen2")
    initialise_model(shape, tokenizer, tmp_path / "seed", seed=0)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "seed", output_loading_info=True)
    assert not any(found.values())
    assert type(model) is Qwen2ForCausalLM
    assert set(model.config.layer_types) == {"full_attention"}
    assert model.config.sliding_window is None
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    reader = CheckpointReader(tmp_path / "seed")
    family = family_of(reader.config)
    assert family.model_type == "qwen2"
    assert family.config_faults(reader.config, "seed") == []
    assert stock_faults(reader.config, "seed") == []
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    assert shapes == family.tensors(reader.config)
    biases = [name for name in shapes if name.endswith(".bias")]
    assert len(biases) == 3 * 3
    assert not any(bool(reader.tensor(name).any()) for name in biases)


def test_untied_embeddings_are_two_tensors(tmp_path, tokenizer):
    shape = LlamaShape(
        hidden_size=32, intermediate_size=48, layers=1, attention_heads=4, tie_embeddings=False
    )
    initialise_model(shape, tokenizer, tmp_path / "seed", seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "seed")
    assert not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path, tokenizer):
    before = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        initialise_model(SHAPE, tokenizer, tmp_path / name, seed=seed)
        torch.rand(3)
    torch.random.set_rng_state(before)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_callers_random_state_is_left_alone(tmp_path, tokenizer):
    before = torch.random.get_rng_state()
    initialise_model(SHAPE, tokenizer, tmp_path / "seed", seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sizes_that_do_not_fit_are_reported_together(tmp_path, tokenizer):
    shape = LlamaShape(hidden_size=36, attention_heads=4, key_value_heads=3)
    with pytest.raises(InputError) as error:
        initialise_model(shape, tokenizer, tmp_path / "seed", seed=0)
    assert [fault.field for fault in error.value.faults] == [
        "shape.hidden_size",
        "shape.key_value_heads",
    ]
    assert not (tmp_path / "seed").exists()
