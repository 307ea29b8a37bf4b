import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import save_pico, save_pico_tokenizer
from upcycle_core.architectures.compare import (
    compare_experts,
    compare_strangers,
)
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.headers import tensor_faults
from upcycle_core.checkpoints import reader as checkpoint_reader
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import TokenIds

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32, "rope_theta": 1e4}


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
    tokens = [TokenIds("BPE", (), {v: 0}) for v in vocabularies]
    # These are copies of one model, which nothing is to be said about here.
    found = compare_experts(readers, dict(zip(readers, tokens, strict=True)), ready=())
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
    assert "id 0 is 'other' here and 'one' there" in found["experts.code.tokenizer"]


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


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "_orig_mod.model."])
def test_other_names_of_all_tensors_are_one_fault(law, tmp_path, prefix):
    def rename(weights):
        for name in list(weights):
            weights[name.replace("model.", prefix, 1)] = weights.pop(name)

    other = CheckpointReader(edited(law, tmp_path / "other", rename))
    (fault,) = compare_experts({"experts.other": other}, {})
    assert f"calls its embedding {prefix}embed_tokens.weight" in fault.remedy


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


def test_types_of_weights_may_differ_between_experts_and_within_one(law, tmp_path):
    def halve(weights):
        weights.update({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})

    def halve_one(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.bfloat16)

    def old(weights):
        halve(weights)
        weights["model.rotary_emb.inv_freq"] = torch.ones(4)

    assert faults(law, edited(law, tmp_path / "code", halve)) == {}
    assert faults(law, edited(law, tmp_path / "old", old)) == {}
    mixed = edited(law, tmp_path / "mixed", halve_one)
    assert faults(law, mixed) == {}
    reader = CheckpointReader(mixed)  # that nobody brings into one form
    (fault,) = tensor_faults(reader, family_of(reader.config), "expert")
    assert "mixes torch.bfloat16, torch.float32" in fault.remedy


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, False),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, True),
        (YARN | {"factor": 4.0}, False),
        (YARN | {"factor": None}, True),
    ],
)
def test_a_length_is_part_of_the_rope_only_where_frequencies_follow_from_it(
    tmp_path, rope, refused
):
    law = save_pico(tmp_path / "law", rope_parameters=rope)
    code = save_pico(tmp_path / "code", seed=1, rope_parameters=rope, max_position_embeddings=256)
    where = ["experts.code.config.max_position_embeddings"]
    assert list(faults(law, code)) == (where if refused else [])
    assert list(strangers(law, code)) == (where if refused else [])


def test_the_rope_of_older_transformers_is_the_same(tmp_path):
    new, old = ({key: "linear", "factor": 2.0} for key in ("rope_type", "type"))
    law = configured(save_pico(tmp_path / "law"), tmp_path / "new", rope_parameters=new)
    code = configured(save_pico(tmp_path / "code", seed=1), tmp_path / "old", rope_parameters=old)
    assert faults(law, code) == {}


@pytest.mark.parametrize(
    "more", [{"attention_factor": None}, {"beta_fast": 32, "beta_slow": 1.0}, {"truncate": None}]
)
def test_a_rope_that_says_what_is_so_anyway_is_the_same(more, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    law = configured(save_pico(tmp_path / "law"), tmp_path / "short", rope_parameters=yarn)
    code = save_pico(tmp_path / "code", seed=1)
    same = configured(code, tmp_path / "same", rope_parameters=yarn | more)
    other = configured(code, tmp_path / "other", rope_parameters=yarn | {"beta_fast": 16})
    assert faults(law, same) == {}
    assert list(faults(law, other)) == ["experts.other.config.rope_parameters"]


def test_numbers_are_compared_as_the_model_computes_with_them(tmp_path):
    law = save_pico(tmp_path / "law", rms_norm_eps=1e-5)
    code = save_pico(tmp_path / "code", seed=1, rms_norm_eps=9.999999747378752e-06)
    assert faults(law, code) == {}


def test_an_expert_that_is_given_twice_is_a_fault_and_the_seed_is_none(law, tmp_path):
    shutil.copytree(law, tmp_path / "again")
    readers = {
        "domains.law.expert": CheckpointReader(law),
        "domains.code.expert": CheckpointReader(tmp_path / "again"),
        "seed_model.model": CheckpointReader(law),
    }
    found = compare_experts(readers, {}, ready=["domains.law.expert", "domains.code.expert"])
    assert [fault.field for fault in found] == ["domains.code.expert"]
    assert "same model as domains.law.expert" in str(found[0])


def test_added_tokens_that_one_expert_lacks_are_no_fault_and_clashes_are(law, tmp_path):
    code = save_pico(tmp_path / "code", seed=1)
    readers = {"a": CheckpointReader(law), "b": CheckpointReader(code), "c": CheckpointReader(law)}

    def said(*more: dict[str, int]) -> list[str]:
        base = {"x": 0, "y": 1}
        tokens = {n: TokenIds("BPE", (), base | own) for n, own in zip("abc", more, strict=True)}
        return [str(fault) for fault in compare_experts(readers, tokens, ready=())]

    assert said({}, {"[PAD]": 2}, {"[PAD]": 2, "<im>": 3}) == []
    (clash,) = said({}, {"[PAD]": 2}, {"<im>": 2})
    assert clash.startswith("c.tokenizer")
    assert "id 2 is '<im>' here and '[PAD]' there" in clash
    (moved,) = said({}, {"[PAD]": 2}, {"[PAD]": 3})
    assert "'[PAD]' is 3 here and 2 there" in moved
    (parted,) = said({}, {"[PAD]": 2}, {"<im>": 3})
    assert "no one tokenizer has the tokens" in parted
    (beyond,) = said({}, {}, {"[PAD]": 96})
    assert "has 96 rows, and the tokenizer's last token is 96" in beyond


def strangers(*directories: Path, unread: tuple[str, ...] = ()) -> dict[str, str]:
    readers = {f"experts.{d.name}": CheckpointReader(d) for d in directories}
    readable = {field: d.name for field, d in zip(readers, directories, strict=True)}
    for name in unread:
        del readable[f"experts.{name}"]
    found = compare_strangers(readers, readable)
    assert len({fault.field for fault in found}) == len(found)
    return {fault.field: str(fault) for fault in found}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_strangers_may_have_any_vocabulary(tmp_path, family):
    """Other tokenizers, other sizes, and rows that no token has."""
    law = save_pico(tmp_path / "law", family)
    code = save_pico(tmp_path / "code", family, seed=1, vocab_size=90)
    padded = save_pico(tmp_path / "padded", family, seed=2, vocab_size=128)
    save_pico_tokenizer(padded, 70)
    assert strangers(law, code, padded) == {}


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("rms_norm_eps", 1e-5, "architecture"),
        ("hidden_act", "gelu", "architecture"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, "rope"),
        ("hidden_size", 64, "shape"),
        ("intermediate_size", 64, "shape"),
        ("num_hidden_layers", 3, "shape"),
        ("num_attention_heads", 8, "shape"),
        ("num_key_value_heads", 4, "shape"),
        ("head_dim", 16, "shape"),
    ],
)
def test_what_keeps_strangers_apart_is_named(law, tmp_path, name, value, word):
    code = save_pico(tmp_path / "code", seed=1, vocab_size=90, **{name: value})
    found = strangers(law, code)
    assert list(found) == [f"experts.code.config.{name}"]
    said = found[f"experts.code.config.{name}"]
    assert f"another {word} than experts.law" in said
    assert "choose another model" in said
    assert "seed" not in said


def test_every_fault_of_every_stranger_is_said_at_once(law, tmp_path):
    def spoil(weights):
        weights["model.norm.weight"][0] = float("nan")

    code = edited(save_pico(tmp_path / "plain", seed=1), tmp_path / "code", spoil)
    math = save_pico(tmp_path / "math", seed=2, intermediate_size=64, num_key_value_heads=4)
    med = save_pico(tmp_path / "med", "qwen2", seed=3)
    few = save_pico(tmp_path / "few", seed=4, vocab_size=90)
    save_pico_tokenizer(few, 96)
    again = edited(code, tmp_path / "again", lambda weights: weights["model.norm.weight"].zero_())
    shutil.copytree(math, tmp_path / "twice")
    found = strangers(law, code, math, med, few, again, tmp_path / "twice")
    assert set(found) == {
        "experts.code",
        "experts.math.config.intermediate_size",
        "experts.math.config.num_key_value_heads",
        "experts.med.config.model_type",
        "experts.few.tokenizer",
        "experts.twice.config.intermediate_size",
        "experts.twice.config.num_key_value_heads",
        "experts.twice",
    }
    assert "norm.weight holds NaN" in found["experts.code"]
    assert "has 90 rows, and the tokenizer's last token is 95" in found["experts.few.tokenizer"]
    assert f"same model as experts.math ({math})" in found["experts.twice"]


def test_a_tokenizer_that_nobody_could_read_is_left_to_who_tried(law, tmp_path):
    few = save_pico(tmp_path / "few", seed=4, vocab_size=90)
    save_pico_tokenizer(few, 96)
    assert strangers(law, few, unread=("few",)) == {}
    (few / "tokenizer.json").write_text("{}")
    assert "cannot be read" in strangers(law, few)["experts.few.tokenizer"]


def test_a_model_that_is_given_twice_is_known_by_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_reader, "CHUNK", 96 * 32)
    law = save_pico(tmp_path / "law", tie_word_embeddings=True)
    code = save_pico(tmp_path / "code", tie_word_embeddings=True, seed=1)
    (tmp_path / "linked").symlink_to(law)

    def add_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    def nudge(weights):
        weights["model.layers.1.mlp.down_proj.weight"][31, 47] += 1e-6

    def pad(weights):
        rows = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = torch.cat([rows, torch.zeros(4, 32)])

    def cast(weights, dtype):
        weights.update({name: tensor.to(dtype) for name, tensor in weights.items()})

    untied = edited(law, tmp_path / "untied", add_head)
    save_pico_tokenizer(untied, 40)
    parts = tmp_path / "parts"
    AutoModelForCausalLM.from_pretrained(law).save_pretrained(parts, max_shard_size="20KB")
    save_pico_tokenizer(parts)
    assert (parts / "model.safetensors.index.json").is_file()
    for copy in (tmp_path / "linked", untied, parts):
        found = strangers(code, law, copy)
        assert list(found) == [f"experts.{copy.name}"]
        said = found[f"experts.{copy.name}"]
        assert "is the same model as experts.law" in said
    assert strangers(law, edited(law, tmp_path / "nudged", nudge)) == {}
    assert strangers(law, edited(law, tmp_path / "padded", pad)).keys() == {"experts.padded"}
    halved = edited(law, tmp_path / "halved", lambda weights: cast(weights, torch.bfloat16))
    widened = edited(halved, tmp_path / "widened", lambda weights: cast(weights, torch.float32))
    readers = {f"experts.{d.name}": CheckpointReader(d) for d in (law, halved, widened)}
    found = [str(fault) for fault in compare_strangers(readers, {})]
    assert len(found) == 1
    assert "is the same model as experts.halved" in found[0]
