from copy import deepcopy

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.pico import pico_config, save_pico
from upcycle_core.architectures.families import FAMILIES, family_of
from upcycle_core.architectures.resolve import SIZES
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def dense(family: str, **overrides) -> dict:
    return pico_config(family, **overrides).to_dict()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_table_lists_exactly_what_transformers_saves(tmp_path, family, tied):
    reader = CheckpointReader(save_pico(tmp_path, family, tie_word_embeddings=tied))
    expected = {name: info.shape for name, info in reader.tensors.items()}
    table = family_of(reader.config).tensors(reader.config)
    assert table == expected
    backbone = family_of(reader.config).tensors(reader.config, ffn=False)
    assert set(table) - set(backbone) == {name for name in expected if ".mlp." in name}


def test_attention_bias_of_qwen3_adds_its_tensors(tmp_path):
    reader = CheckpointReader(save_pico(tmp_path, "qwen3", attention_bias=True))
    table = family_of(reader.config).tensors(reader.config)
    assert table == {name: info.shape for name, info in reader.tensors.items()}
    assert "model.layers.1.self_attn.o_proj.bias" in table


def test_the_router_reads_the_norm_before_the_ffn():
    model = AutoModelForCausalLM.from_config(pico_config())
    family = FAMILIES["llama"]
    seen = []
    norm = model.get_submodule(family.router_norm(1))
    norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    mlp = model.get_submodule(family.ffn(1).gate.rsplit(".", 2)[0])
    mlp.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    model(input_ids=model.dummy_inputs["input_ids"])
    assert seen[0] is seen[1]


def test_ffn_tensors_are_told_from_the_rest():
    family = FAMILIES["llama"]
    assert all(family.is_ffn(name) for layer in (0, 11) for name in family.ffn(layer))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"):
        assert not family.is_ffn(name)


def test_an_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(InputError) as caught:
        family_of({"model_type": "gemma2"}, field="experts.law.config.model_type")
    message = str(caught.value)
    assert "experts.law.config.model_type = 'gemma2'" in message
    assert all(name in message for name in ("llama", "mistral", "qwen2", "qwen3"))


@pytest.mark.parametrize(
    ("family", "overrides", "name"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"sliding_window": 16}, "sliding_window"),
        ("llama", {"logit_softcapping": 30.0}, "logit_softcapping"),
        ("mistral", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "layer_types",
        ),
    ],
)
def test_what_the_target_cannot_express_is_listed(family, overrides, name):
    config = dense(family, **overrides)
    faults = family_of(config).config_faults(config, "experts.law")
    assert [fault.field for fault in faults] == [f"experts.law.config.{name}"]
    with pytest.raises(InputError, match=name):
        family_of(config).target_config(config, experts=2, top_k=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stock_configuration_has_no_faults(family):
    config = dense(family)
    assert family_of(config).config_faults(config, "experts.law") == []


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
OLD_ROPE = {
    "rope_parameters": None,
    "rope_theta": 5e5,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": None},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": YARN},
        OLD_ROPE,
        {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": 9, "use_sliding_window": False},
        {"attention_bias": True},
    ],
)
def test_defaults_are_those_of_the_stock_class(family, changes):
    sizes = dict.fromkeys(SIZES, 8) | {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": family, **sizes, **changes}
    if family == "qwen3" and changes.get("head_dim", 0) is None:
        del config["head_dim"]
    stock = CONFIG_MAPPING[family].from_dict(deepcopy(config)).to_dict()
    ours = FAMILIES[family].resolve(config)
    names = {*FAMILIES[family].kept, *FAMILIES[family].demanded, *FAMILIES[family].defaults, *SIZES}
    names |= {"layer_types"}
    if family in ("qwen2", "olmo2"):  # it has no such attribute; the model divides
        stock["head_dim"] = stock["hidden_size"] // stock["num_attention_heads"]
    assert {n: ours.get(n) for n in names} == {n: stock.get(n) for n in names}


def test_a_rope_of_whole_heads_is_the_plain_one():
    config = {"model_type": "llama", **dict.fromkeys(SIZES, 8)}
    said = config | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}
    rope = FAMILIES["llama"].resolve(said)["rope_parameters"]
    assert rope == FAMILIES["llama"].resolve(config)["rope_parameters"]


@pytest.mark.parametrize("first", [32, None])
@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        YARN | {"original_max_position_embeddings": 16},
        LLAMA3_ROPE,
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
)
def test_a_first_length_beside_the_rope_counts_as_in_the_stock_model(rope, first):
    config = dense("llama") | {"rope_parameters": rope, "max_position_embeddings": 128}
    config |= {} if first is None else {"original_max_position_embeddings": first}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"].from_dict(deepcopy(config)))
    family = FAMILIES["llama"]
    assert family.resolve(config)["rope_parameters"] == model.config.rope_parameters
    assert family.config_faults(config, "x") == []
    assert family.unread(config) == ["_name_or_path"]


def test_key_value_heads_default_to_the_heads():
    config = {"model_type": "llama", **dict.fromkeys(SIZES, 8)}
    del config["num_key_value_heads"]
    assert FAMILIES["llama"].resolve(config)["num_key_value_heads"] == 8


@pytest.mark.parametrize("value", ["wide", None, 0, 2.0])
def test_a_size_that_is_no_number_is_an_input_error(value):
    config = dense("llama") | {"hidden_size": value}
    with pytest.raises(InputError, match=r"experts\.law\.config\.hidden_size"):
        family_of(config).config_faults(config, "experts.law")


def test_one_rope_a_layer_type_is_refused():
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = dense("qwen2") | {"rope_parameters": rope}
    faults = family_of(config).config_faults(config, "experts.law")
    assert [fault.field for fault in faults] == ["experts.law.config.rope_parameters"]


@pytest.mark.parametrize("top_k", [0, 4])
def test_more_experts_a_token_than_there_are_is_refused(top_k):
    config = dense("llama")
    with pytest.raises(InputError, match=r"moe\.top_k"):
        family_of(config).target_config(config, experts=3, top_k=top_k)


def test_older_and_newer_readers_find_the_same_rope():
    config = dense("llama", rope_parameters=LLAMA3_ROPE)
    target = family_of(config).target_config(config, experts=2, top_k=1)
    assert target["rope_parameters"] == LLAMA3_ROPE
    assert target["rope_theta"] == 500000.0
    assert target["rope_scaling"] == {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    plain = dense("llama")
    assert family_of(plain).target_config(plain, experts=2, top_k=1)["rope_scaling"] is None


def test_a_configuration_of_transformers_4_says_the_same():
    new = dense("llama", rope_parameters=LLAMA3_ROPE, dtype="bfloat16")
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "dtype", "head_dim")}
    old["torch_dtype"] = "bfloat16"
    old["rope_theta"] = LLAMA3_ROPE["rope_theta"]
    old["rope_scaling"] = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    family = family_of(old)
    assert family.config_faults(old, "x") == []
    targets = [family.target_config(c, experts=2, top_k=1) for c in (old, new)]
    assert targets[0] == targets[1]
    assert targets[0]["torch_dtype"] == targets[0]["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_target_back_unchanged(family):
    config = dense(family, rope_parameters=LLAMA3_ROPE, rms_norm_eps=3e-5)
    target = family_of(config).target_config(config, experts=3, top_k=2)
    stock = AutoConfig.for_model(**target)
    read = stock.to_dict()
    for name in ("rope_parameters", "rms_norm_eps", "head_dim", "vocab_size", "eos_token_id"):
        assert read[name] == config[name]
    assert stock.num_experts_per_tok == 2


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"num_local_experts": 3, "sliding_window": None}),
        ("qwen2", {"num_experts": 3, "qkv_bias": True, "norm_topk_prob": True}),
        ("qwen3", {"num_experts": 3, "num_local_experts": 3, "norm_topk_prob": True}),
        ("qwen2", {"moe_intermediate_size": 48, "intermediate_size": 48}),
    ],
)
def test_what_exactness_needs_is_explicit(family, fields):
    config = dense(family)
    target = family_of(config).target_config(config, experts=3, top_k=1)
    assert {name: target[name] for name in fields} == fields
