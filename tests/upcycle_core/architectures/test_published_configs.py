"""Fields of published config.json files, whole: each is accepted, or refused for its reason."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.configs.__main__ import PAGE, page
from tests.configs.published import PUBLISHED, REFUSED, checkpoint, config_of
from upcycle_core.architectures.compare import compare_experts, compare_strangers
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.inspect import force_expert

ACCEPTED = [name for name in PUBLISHED if name not in REFUSED]


def test_there_are_enough_of_them():
    assert len(PUBLISHED) >= 30
    assert set(REFUSED) < set(PUBLISHED)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_model_that_people_have_becomes_an_expert_that_computes_the_same(tmp_path, name):
    experts = {seed: checkpoint(name, tmp_path / seed) for seed in ("law", "code")}
    readers = {n: CheckpointReader(path, field=n) for n, path in experts.items()}
    assert compare_experts(readers, {}) == []
    family = family_of(readers["law"].config)
    symphony = compare_strangers(readers, ())
    assert bool(symphony) == (not family.norms_first)
    write_backbone(list(readers.values()), tmp_path / "backbone", max_shard_bytes=10**9)
    # The experts share what is averaged, so a forced expert is its dense model.
    config = readers["law"].config
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    routers = {layer: torch.randn(hidden, 2, dtype=torch.float64) for layer in range(layers)}
    out = tmp_path / "moe"
    assemble(experts, tmp_path / "backbone", routers, out, top_k=1, max_shard_bytes=10**9)
    ids = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(5))
    moe = load_causal_lm(out, dtype=torch.float32)
    for index, path in enumerate(experts.values()):
        dense = load_causal_lm(path, dtype=torch.float32)
        with torch.no_grad(), force_expert(moe, index):
            assert torch.equal(moe(input_ids=ids).logits, dense(input_ids=ids).logits)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_model_that_no_stock_moe_holds_is_refused_with_the_reason(name, reason):
    with pytest.raises(InputError) as refused:
        family_of(config_of(name), field="domains.law.expert.config.model_type")
    assert reason in str(refused.value)
    assert "choose a model of" in str(refused.value)


CHANGES = {
    "partial_rotary_factor": 0.5,
    "is_causal": False,
    "rope_interleaved": True,
    "use_mrope": True,
    "attention_multiplier": 0.01,
    "residual_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "quantization_config": {"quant_method": "gptq"},
    "attention_chunk_size": 8192,
    "is_encoder_decoder": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 1024,
    "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},
}
HARMLESS = {
    "use_mrope": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "bias": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention", "full_attention"],
    "use_bfloat16": False,
    "remove_invalid_values": False,
    "model_max_length": 2048,
    "max_sequence_length": 2048,
    "max_length": 4096,
    "do_sample": True,
    "temperature": 0.6,
    "activation": "swiglu",
    "attn_implementation": "flash_attention_2",
    "_attn_implementation": "flash_attention_2",
    "_flash_attn_2_enabled": True,
    "use_flash_attention_2": True,
    "neftune_noise_alpha": 5,
    "_commit_hash": "3f",
    "_model_name_or_path": "x",
    "unk_token_id": 0,
    "transformers.js_config": {},
}


def said(name: str, value: object) -> list[str]:
    config = config_of("meta-llama/Llama-2-7b-hf") | {name: value}
    return [fault.field for fault in family_of(config).config_faults(config, "experts.law")]


@pytest.mark.parametrize(("name", "value"), CHANGES.items())
def test_what_could_change_a_computation_is_refused(name, value):
    assert f"experts.law.config.{name}" in said(name, value)


@pytest.mark.parametrize(("name", "value"), HARMLESS.items())
def test_what_changes_nothing_is_no_fault(name, value):
    assert said(name, value) == []


@pytest.mark.parametrize(
    "model",
    ["meta-llama/Llama-2-7b-hf", "allenai/OLMo-2-0425-1B", "baidu/ERNIE-4.5-0.3B-PT"],
)
def test_a_window_that_is_not_used_is_no_fault_and_is_not_passed_on(model):
    config = config_of(model) | {"sliding_window": 4096, "use_sliding_window": False}
    assert family_of(config).config_faults(config, "x") == []
    assert family_of(config).target_config(config, experts=2, top_k=1)["sliding_window"] is None


def test_what_nothing_reads_is_listed_by_name():
    config = config_of("meta-llama/Llama-2-7b-hf") | {"activation": "swiglu", "use_mrope": False}
    assert family_of(config).unread(config) == ["_name_or_path", "activation"]


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"head_dim": {}}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
    ],
)
def test_values_that_are_none_are_faults(values, where):
    config = config_of("meta-llama/Llama-2-7b-hf") | values
    with pytest.raises(InputError, match=where):
        family_of(config).target_config(config, experts=2, top_k=1)


def test_sliding_layers_without_a_window_are_a_fault():
    config = config_of("Qwen/Qwen2.5-0.5B") | {"layer_types": ["sliding_attention"] * 24}
    (fault,) = family_of(config).config_faults(config, "x")
    assert fault.field == "x.config.layer_types"


def test_full_layers_of_a_mistral_are_a_fault_that_says_what_to_do():
    """transformers reads one that has them as a Ministral, which has no window in such layers."""
    config = config_of("mistralai/Mistral-7B-v0.1") | {"layer_types": ["full_attention"] * 2}
    (fault,) = family_of(config).config_faults(config, "x")
    assert fault.field == "x.config.layer_types"
    assert "remove it" in fault.remedy


def test_a_rope_of_parts_of_heads_is_refused_wherever_it_is_said():
    rope = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    assert said("rope_scaling", rope) == ["experts.law.config.partial_rotary_factor"]


def test_the_page_of_models_is_what_the_table_says():
    assert PAGE.read_text() == page()


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": ["llama"]},
        {"dtype": "tiny"},
        {"dtype": [1]},
        {"attention_dropout": None},  # which Llama's class takes, and Mixtral's does not
    ],
)
def test_odd_types_in_a_config_are_faults_and_no_tracebacks(tmp_path, values):
    path = checkpoint("TinyLlama/TinyLlama-1.1B-Chat-v1.0", tmp_path / "law")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))
    assert compare_experts({"experts.law": CheckpointReader(path)}, {})


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"', "[" * 100_000, "{"])
def test_a_config_that_is_no_object_is_a_fault(tmp_path, text):
    path = checkpoint("TinyLlama/TinyLlama-1.1B-Chat-v1.0", tmp_path / "law")
    (path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        CheckpointReader(path)


@pytest.mark.parametrize(
    "text", ["[]", '{"weight_map": null}', '{"weight_map": [1]}', '{"weight_map": {"x": 3}}']
)
def test_an_index_that_is_none_is_a_fault(tmp_path, text):
    path = checkpoint("TinyLlama/TinyLlama-1.1B-Chat-v1.0", tmp_path / "law")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match="index"):
        CheckpointReader(path)


def test_the_stock_class_reads_the_published_fields_as_we_do():
    """The oracle of what is left out: stock logits with the file as published and without them."""
    for name in ("HuggingFaceTB/SmolLM2-135M", "huggyllama/llama-7b", "tiiuae/Falcon3-1B-Base"):
        full = config_of(name)
        unread = family_of(full).unread(full)
        assert unread, name
        logits = []
        for config in (full, {k: v for k, v in full.items() if k not in unread}):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
            with torch.no_grad():
                logits.append(model(input_ids=torch.arange(9)[None]).logits)
        assert torch.equal(*logits), name
