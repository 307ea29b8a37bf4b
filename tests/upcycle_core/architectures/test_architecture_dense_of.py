import json
import re

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from tests.pico import pico_config
from upcycle_core.architectures.dense_of import dense_of, moe_tensors
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.errors import InputError

CASES = {
    "llama": {},
    "llama, wide heads": {"head_dim": 16, "tie_word_embeddings": True},
    "llama, yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
    "llama, no default": {
        "rms_norm_eps": 1e-4,
        "hidden_act": "gelu",
        "attention_dropout": 0.25,
        "initializer_range": 0.5,
        "use_cache": False,
    },
    "mistral": {},
    "mistral, sliding window": {"sliding_window": 5},
    "qwen2": {},
    "qwen2, windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "qwen3, attention bias": {"attention_bias": True},
    "qwen3, windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_way_back_from_a_dense_configuration(case):
    family = FAMILIES[case.split(",")[0]]
    dense = pico_config(family.model_type, **CASES[case]).to_dict()
    moe = family.target_config(dense, experts=3, top_k=2, dtype=torch.bfloat16)
    found = dense_of(moe, like=family)
    assert family.target_config(found, experts=3, top_k=2) == moe | {"transformers_version": None}
    full, expected = family.resolve(found), family.resolve(dense)
    for name in ("layer_types", "sliding_window", "attention_bias", "intermediate_size"):
        assert full.get(name) == expected.get(name), name
    # What transformers saves of the MoE says the same in other words.
    again = CONFIG_MAPPING[moe["model_type"]].from_dict(dict(moe)).to_dict()
    assert dense_of(json.loads(json.dumps(again)), like=family) == found


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        (MixtralConfig(), "llama"),
        (MixtralConfig(sliding_window=4096), "mistral"),
        (Qwen3MoeConfig(head_dim=128), "qwen3"),
    ],
)
def test_published_mixtures_have_a_dense_model_of_an_experts_size(config, model_type):
    moe = config.to_dict()
    dense = dense_of(moe)
    assert dense["model_type"] == model_type
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(dict(dense)))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = moe_tensors(moe, dense)
    for name, shape in shapes.items():
        if ".mlp." not in name:
            assert expected[name] == shape
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (width, config.hidden_size)
    routers = [name for name in expected if re.search(r"(mlp|moe)\.gate\.weight", name)]
    assert len(routers) == config.num_hidden_layers


def test_what_a_dense_model_cannot_say_is_refused_all_at_once():
    moe = Qwen3MoeConfig(decoder_sparse_step=2, mlp_only_layers=[1], num_experts_per_tok=200)
    with pytest.raises(InputError) as caught:
        dense_of(moe.to_dict() | {"is_causal": False, "_commit_hash": "3f"})
    message = str(caught.value)
    for name in ("decoder_sparse_step", "mlp_only_layers", "num_experts_per_tok", "is_causal"):
        assert f"moe.config.{name} = " in message
    with pytest.raises(InputError, match="mixtral, qwen2_moe, qwen3_moe"):
        dense_of({"model_type": "llama"})
