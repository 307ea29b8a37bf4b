"""LoRA adapters merged by streaming, against peft's own ``merge_and_unload``."""

import json

import pytest
import torch
from forms import change_json, save_adapter
from pico import save_pico, save_pico_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from upcycle_core.checkpoints.given_as import given_as
from upcycle_core.errors import InputError
from upcycle_core.given.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, merge_adapter


@pytest.fixture
def base(tmp_path):
    return save_pico(tmp_path / "base")


def merged(adapter, base, out):
    merge_adapter(Adapter(adapter), base, out)
    return load_file(out / "model.safetensors")


VARIANTS = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        "alpha_pattern": {"down_proj": 3, "0.self_attn.q_proj": 11},
    },
    "fan-in-fan-out": {"fan_in_fan_out": True},  # peft lays it aside for linear layers
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "whole-modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "one-norm-whole": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_weights_are_pefts_to_the_last_bit(tmp_path, base, variant):
    adapter, tuned = save_adapter(tmp_path / "adapter", base, **VARIANTS[variant])
    before = load_file(base / "model.safetensors")
    ours, theirs = merged(adapter, base, tmp_path / "out"), tuned.merge_and_unload().state_dict()
    assert set(ours) == set(theirs)
    assert any(not torch.equal(ours[name], before[name]) for name in before)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_biases_are_merged_too(tmp_path):
    base = save_pico(tmp_path / "base", "qwen2")
    names = ["q_proj", "v_proj"]
    for bias in ({"bias": "lora_only"}, {"bias": "all"}, {"lora_bias": True}):
        folder = tmp_path / "-".join(map(str, *bias.items()))
        adapter, tuned = save_adapter(folder, base, target_modules=names, **bias)
        ours = merged(adapter, base, folder / "out")
        for name, tensor in tuned.merge_and_unload().state_dict().items():
            assert torch.equal(ours[name], tensor), (bias, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_fp32_whatever_the_base_is(tmp_path, base, dtype):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(tmp_path / "half")
    save_pico_tokenizer(tmp_path / "half")
    adapter, tuned = save_adapter(tmp_path / "adapter", tmp_path / "half", dtype=dtype)
    ours = merged(adapter, tmp_path / "half", tmp_path / "out")
    for name, tensor in tuned.merge_and_unload().state_dict().items():
        assert ours[name].dtype == dtype
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("touched", ["lm_head", "embed_tokens"])
def test_a_tied_head_that_is_touched_is_tied_no_more(tmp_path, touched, is_stored):
    base = save_pico(tmp_path / "base", tie_word_embeddings=True)
    if is_stored:  # as some are published, beside the embedding
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter, tuned = save_adapter(tmp_path / "adapter", base, target_modules=[touched, "q_proj"])
    merged(adapter, base, tmp_path / "out")
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    # The same sums in another order, in fp32; without untying they differ by 1.
    torch.testing.assert_close(logits(found), logits(tuned), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_one", [True, False])
def test_a_tied_head_of_a_longer_vocabulary_stays_tied(tmp_path, is_one):
    """peft saves both whole: one tensor, unless they were trained apart."""
    base = save_pico(tmp_path / "base", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "longer")
    adapter, tuned = save_adapter(tmp_path / "adapter", tmp_path / "longer")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    embedding = tuned.base_model.model.model.embed_tokens.weight.detach().clone()
    tensors["base_model.model.model.embed_tokens.weight"] = embedding
    tensors["base_model.model.lm_head.weight"] = embedding + (0 if is_one else 1)
    save_file(tensors, file)
    save_pico_tokenizer(adapter, 100)
    ours = merged(adapter, base, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (is_one, 100)
    assert ("lm_head.weight" in ours) != is_one
    assert torch.equal(ours["model.embed_tokens.weight"], embedding)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def longer(base, out, rows=100):
    """The base with added tokens, as it is before it is tuned."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(rows)
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_tied_head_has_the_added_rows_that_an_adapted_embedding_had(tmp_path, is_stored):
    """peft saves what stands under LoRA of an embedding, once: of its model the head has the same,
    and no LoRA."""
    base = save_pico(tmp_path / "base", tie_word_embeddings=True)
    if is_stored:
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    names = ["embed_tokens", "q_proj"]
    adapter, tuned = save_adapter(
        tmp_path / "adapter", longer(base, tmp_path / "longer"), target_modules=names
    )
    assert not [name for name in load_file(adapter / ADAPTER_WEIGHTS) if "lm_head" in name]
    save_pico_tokenizer(adapter, 100)
    merged(adapter, base, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (found.config.tie_word_embeddings, found.config.vocab_size) == (False, 100)
    torch.testing.assert_close(logits(found), logits(tuned), atol=1e-5, rtol=1e-4)


def test_an_untied_head_that_the_adapter_does_not_bring_is_asked_for(tmp_path, base):
    names = ["embed_tokens", "q_proj"]
    adapter, _ = save_adapter(
        tmp_path / "adapter", longer(base, tmp_path / "longer"), target_modules=names
    )
    refused(adapter, base, tmp_path / "out", r"would have \[96, 100\] rows; save both")


@pytest.mark.parametrize("rows", [96, 100])
@pytest.mark.parametrize(
    "ways",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"]},
    ],
    ids=["adapted", "whole", "neither"],
)
def test_ends_that_were_kept_tied_stay_tied(tmp_path, ways, rows):
    base = save_pico(tmp_path / "base", tie_word_embeddings=True)
    start = longer(base, tmp_path / "longer", rows)
    adapter, tuned = save_adapter(tmp_path / "adapter", start, ensure_weight_tying=True, **ways)
    save_pico_tokenizer(adapter, rows)
    is_touched = len(load_file(adapter / ADAPTER_WEIGHTS)) > 4
    ours = merged(adapter, base if is_touched else start, tmp_path / "out")
    assert "lm_head.weight" not in ours
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (found.config.tie_word_embeddings, found.config.vocab_size) == (True, rows)
    # The same sums in another order: logits are some hundreds where the head has LoRA.
    torch.testing.assert_close(logits(found), logits(tuned), atol=1e-4, rtol=1e-4)


def test_ends_that_were_adapted_apart_are_two(tmp_path):
    base = save_pico(tmp_path / "base", tie_word_embeddings=True)
    names = ["embed_tokens", "lm_head", "q_proj"]
    adapter, tuned = save_adapter(tmp_path / "adapter", base, target_modules=names)
    assert "lm_head.weight" in merged(adapter, base, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), logits(tuned), atol=1e-4, rtol=1e-4)


def test_added_tokens_come_along(tmp_path, base):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "longer")
    modules = ["embed_tokens", "lm_head"]
    adapter, tuned = save_adapter(
        tmp_path / "adapter", tmp_path / "longer", modules_to_save=modules
    )
    save_pico_tokenizer(adapter, 100)
    ours = merged(adapter, base, tmp_path / "out")
    assert torch.equal(
        ours["lm_head.weight"], tuned.merge_and_unload().state_dict()["lm_head.weight"]
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 100
    words = (tmp_path / "out" / "tokenizer.json").read_text()
    assert words == (adapter / "tokenizer.json").read_text()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", [["embed_tokens", "lm_head"], ["embed_tokens"]])
def test_added_tokens_come_along_from_a_base_that_has_them_not(tmp_path, tied, modules):
    """As people train: peft then saves what was trained whole twice, and as it began."""
    base = save_pico(tmp_path / "base", tie_word_embeddings=tied)
    start = longer(base, tmp_path / "longer")
    adapter, tuned = save_adapter(
        tmp_path / "adapter", start, target_modules=["q_proj"], modules_to_save=modules
    )
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(adapter)
    names = " ".join(load_file(adapter / ADAPTER_WEIGHTS))
    assert "embed_tokens.modules_to_save.weight" in names
    assert "embed_tokens.original_module.weight" in names
    save_pico_tokenizer(adapter, 100)
    merged(adapter, base, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.config.vocab_size == 100
    torch.testing.assert_close(logits(found), logits(tuned), atol=1e-4, rtol=1e-4)


def test_what_it_was_is_said_and_its_tokenizer_is_the_bases(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    merged(adapter, base, tmp_path / "out")
    assert given_as(tmp_path / "out") == ("LoRA adapter (rank 4, 14 matrices) merged into its base")
    words = (tmp_path / "out" / "tokenizer.json").read_text()
    assert words == (base / "tokenizer.json").read_text()


def refused(adapter, base, out, match):
    with pytest.raises(InputError, match=match) as caught:
        merge_adapter(Adapter(adapter), base, out)
    assert not list(out.glob("*"))
    return caught.value.faults


REFUSED = {
    "another method": ({"peft_type": "IA3"}, "peft_type = 'IA3': only LORA"),
    "DoRA": ({"use_dora": True}, "use_dora = True: is no plain LoRA"),
    "experts": ({"target_parameters": ["experts.up"]}, "target_parameters"),
    "an unknown variant": ({"of_tomorrow": {"a": 1}}, "of_tomorrow"),
    "another start": ({"init_lora_weights": "pissa"}, "changes the base as well"),
    "another rank": ({"r": 5}, "its config says r = 5"),
    "no scaling": ({"lora_alpha": None}, "lora_alpha = None: must be a positive number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_lora_is_refused(tmp_path, base, case):
    changes, match = REFUSED[case]
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    change_json(adapter / ADAPTER_CONFIG, **changes)
    refused(adapter, base, tmp_path / "out", match)


def test_all_faults_of_its_settings_come_at_once(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    change_json(adapter / ADAPTER_CONFIG, use_dora=True, init_lora_weights="olora", r=0)
    assert len(refused(adapter, base, tmp_path / "out", "use_dora")) == 3


def change_tensors(adapter, change):
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    save_file(change(tensors), adapter / ADAPTER_WEIGHTS)


def test_an_adapter_that_changes_nothing_is_refused(tmp_path, base):
    fresh, _ = save_adapter(tmp_path / "fresh", base, init_lora_weights=True)
    refused(fresh, base, tmp_path / "out", "changes nothing")
    of_base = load_file(base / "model.safetensors")["lm_head.weight"]
    change_tensors(fresh, lambda tensors: tensors | {"base_model.model.lm_head.weight": of_base})
    refused(fresh, base, tmp_path / "out", "changes nothing")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named(tmp_path, base, value):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    change_tensors(adapter, lambda t: t | {name: torch.full_like(t[name], value)})
    refused(adapter, base, tmp_path / "out", f"{name} holds no finite")


def test_every_tensor_has_a_meaning_and_a_place(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    change_tensors(adapter, lambda t: t | {f"{place}.lora_magnitude_vector": torch.ones(32)})
    refused(adapter, base, tmp_path / "out", "lora_magnitude_vector is no tensor of LoRA")
    change_tensors(
        adapter, lambda t: {n: v for n, v in t.items() if not n.endswith("magnitude_vector")}
    )
    change_tensors(adapter, lambda t: t | {"base_model.model.vision.weight": torch.ones(3)})
    refused(adapter, base, tmp_path / "out", "vision.weight is not there, the adapter's is")


def test_half_a_pair_is_refused(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    half = "0.mlp.up_proj.lora_A"
    change_tensors(adapter, lambda t: {n: v for n, v in t.items() if half not in n})
    refused(adapter, base, tmp_path / "out", "A and B belong together")


def test_an_adapter_of_another_base_is_named(tmp_path, base):
    other = save_pico(tmp_path / "other", hidden_size=64, head_dim=16)
    adapter, _ = save_adapter(tmp_path / "adapter", other)
    (fault,) = refused(adapter, base, tmp_path / "out", "is an adapter of another model")
    assert str(base) in fault.remedy
    assert "and 11 more" in fault.remedy


def test_a_vocabulary_that_is_half_resized_is_refused(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head"])
    name = "base_model.model.lm_head.weight"
    change_tensors(adapter, lambda t: t | {name: torch.ones(100, 32)})
    refused(adapter, base, tmp_path / "out", r"would have \[96, 100\] rows")


def test_pickled_weights_are_not_read(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    (adapter / ADAPTER_WEIGHTS).rename(adapter / "adapter_model.bin")
    refused(adapter, base, tmp_path / "out", "pickled weights")


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json"]
)
def test_a_part_of_a_tokenizer_is_none(tmp_path, base, name):
    """Trainers save a chat template, or what classes need, beside an adapter."""
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    template = "{{ messages }}"
    content = {"tokenizer_class": "LlamaTokenizer", "chat_template": template}
    (adapter / name).write_text(template if name.endswith("jinja") else json.dumps(content))
    merged(adapter, base, tmp_path / "out")
    ours, theirs = (AutoTokenizer.from_pretrained(d) for d in (tmp_path / "out", base))
    assert ours("a b").input_ids == theirs("a b").input_ids
    assert len(ours) == len(theirs)
    assert ours.chat_template == (template if name.endswith("jinja") else None)


def test_an_adapter_s_templates_that_are_asked_for_by_name_come_along(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    merged(adapter, base, tmp_path / "out")
    templates = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert templates == {"default": "{{ messages }}", "rag": "{{ documents }}"}
