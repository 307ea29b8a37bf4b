import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pico import save_pico
from upcycle_core.architectures.compare import compare_experts
from upcycle_core.checkpoints.reader import CheckpointReader


@pytest.fixture(scope="module")
def law(tmp_path_factory) -> Path:
    return save_pico(tmp_path_factory.mktemp("compare") / "law")


def edited(source: Path, out: Path, change) -> Path:
    """A copy of a checkpoint whose weights went through ``change``."""
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def configured(source: Path, out: Path, **values) -> Path:
    """A copy of a checkpoint with other values in config.json."""
    shutil.copytree(source, out)
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return out


def faults(law: Path, code: Path, vocabularies=("v", "v")) -> dict[str, str]:
    readers = {f"experts.{d.name}": CheckpointReader(d) for d in (law, code)}
    found = compare_experts(readers, dict(zip(readers, vocabularies, strict=True)))
    return {fault.field: str(fault) for fault in found}


def test_experts_of_one_seed_fit(law, tmp_path):
    assert faults(law, save_pico(tmp_path / "code", seed=1)) == {}


def test_no_experts_no_faults():
    assert compare_experts({}, {}) == []


def test_what_does_not_change_the_function_may_differ(law, tmp_path):
    code = configured(law, tmp_path / "code", eos_token_id=[0, 5], use_cache=False)
    assert faults(law, code) == {}


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("rms_norm_eps", 1e-5, "architecture"),
        ("hidden_act", "gelu", "architecture"),
        ("max_position_embeddings", 256, "rope"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, "rope"),
    ],
)
def test_a_configuration_that_differs_is_named(law, tmp_path, name, value, word):
    found = faults(law, configured(law, tmp_path / "code", **{name: value}))
    assert list(found) == [f"experts.code.config.{name}"]
    assert f"another {word} than experts.law" in found[f"experts.code.config.{name}"]


def test_other_shapes_and_rope_are_reported_together(law, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    code = save_pico(tmp_path / "code", intermediate_size=64, vocab_size=98, rope_parameters=rope)
    found = faults(law, code, ("v", "w"))
    assert set(found) == {
        "experts.code.config.intermediate_size",
        "experts.code.config.vocab_size",
        "experts.code.config.rope_parameters",
        "experts.code.tokenizer",
    }


def test_other_families_and_unknown_ones_are_named(law, tmp_path):
    found = faults(law, save_pico(tmp_path / "code", "qwen2"))
    assert list(found) == ["experts.code.config.model_type"]
    found = faults(law, configured(law, tmp_path / "gemma", model_type="gemma2"))
    assert "supported" in found["experts.gemma.config.model_type"] or "another" in str(found)


def test_an_unknown_architecture_lists_the_supported_ones(law, tmp_path):
    code = configured(law, tmp_path / "code", model_type="gemma2")
    found = compare_experts({"experts.code": CheckpointReader(code)}, {})
    assert "llama, mistral, qwen2, qwen3" in str(found[0])


def test_what_the_stock_class_rejects_is_said(law, tmp_path):
    code = configured(law, tmp_path / "code", rms_norm_eps="tiny")
    found = [str(f) for f in compare_experts({"experts.code": CheckpointReader(code)}, {})]
    assert len(found) == 1
    assert "rms_norm_eps" in found[0]


def test_looking_changes_nothing(law, tmp_path):
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    reader = CheckpointReader(configured(law, tmp_path / "code", rope_parameters=rope))
    before = json.dumps(reader.config)
    assert compare_experts({"experts.code": reader}, {}) == []
    assert json.dumps(reader.config) == before


def test_the_same_size_with_other_ids_is_a_fault(law, tmp_path):
    found = faults(law, save_pico(tmp_path / "code"), ("one", "other"))
    assert list(found) == ["experts.code.tokenizer"]
    assert "same ids" in found["experts.code.tokenizer"]


def test_missing_misshapen_surplus_and_nan_tensors_are_all_named(law, tmp_path):
    def spoil(weights):
        del weights["model.norm.weight"]
        weights["lm_head.weight"] = torch.zeros(95, 32)
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")

    code = edited(law, tmp_path / "code", spoil)
    readers = {f"experts.{d.name}": CheckpointReader(d) for d in (law, code)}
    found = [str(fault) for fault in compare_experts(readers, {})]
    assert len(found) == 4
    assert all(line.startswith("experts.code") for line in found)
    text = "\n".join(found)
    assert "lacks tensor model.norm.weight" in text
    assert "lm_head.weight has shape [95, 32]" in text
    assert "holds model.layers.0.self_attn.q_proj.bias" in text
    assert "model.layers.1.mlp.up_proj.weight holds NaN" in text


def test_a_tied_head_may_lie_on_disk_only_if_it_is_the_embedding(tmp_path):
    law = save_pico(tmp_path / "law", tie_word_embeddings=True)

    def add_same(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    def add_other(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1

    assert faults(law, edited(law, tmp_path / "same", add_same)) == {}
    found = faults(law, edited(law, tmp_path / "other", add_other))
    assert "tie_word_embeddings to false" in found["experts.other"]


def test_rotary_frequencies_of_old_checkpoints_are_dropped_by_name(law, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    old = edited(law, tmp_path / "old", lambda weights: weights.update({name: torch.ones(4)}))
    assert faults(law, old) == {}


def test_types_of_weights_must_agree(law, tmp_path):
    def halve(weights):
        weights.update({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})

    def halve_one(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.bfloat16)

    found = faults(law, edited(law, tmp_path / "code", halve))
    assert "another type of weights" in found["experts.code"]
    found = faults(law, edited(law, tmp_path / "mixed", halve_one))
    assert "mixes torch.bfloat16, torch.float32" in found["experts.mixed"]
