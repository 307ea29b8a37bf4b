"""Experts of other types, lengths and vocabularies become one model that computes as they do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pico import save_pico, save_pico_tokenizer
from upcycle_core.architectures.compare import compare_experts, compare_strangers
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.form import Form, changes, common_forms, write_in_form
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import (
    load_tokenizer,
    token_ids,
    tokenizer_files,
    vocabulary_fingerprint,
)
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.inspect import force_expert

WIDTH = 64


def seeded(folder: Path, name: str, *, seed: int, **overrides) -> Path:
    """An expert of one seed: its FFNs are its own, the rest is every expert's, and fits bf16."""
    out = save_pico(folder / name, intermediate_size=WIDTH, seed=0, **overrides)
    weights = load_file(out / "model.safetensors")
    torch.manual_seed(seed)
    for key in weights:
        if ".mlp." in key:
            weights[key] = 0.2 * torch.randn_like(weights[key])
        weights[key] = weights[key].bfloat16().float()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def with_tokens(directory: Path, tokens: list[str], rows: int | None = None) -> Path:
    """Tokens added the way people do: to the tokenizer, and rows to embedding and head."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(rows or len(tokenizer), mean_resizing=False)
    model.save_pretrained(directory)
    return directory


def recast(directory: Path, dtype: torch.dtype) -> Path:
    AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).save_pretrained(directory)
    return directory


def brought(models: dict[str, Path], out: Path, **options) -> tuple[dict[str, Path], dict]:
    """Every model in the common form, written by way of the form's file."""
    readers = {name: CheckpointReader(path, field=name) for name, path in models.items()}
    tokens = {name: token_ids(path) for name, path in models.items()}
    assert compare_experts(readers, tokens) == []
    forms = common_forms(readers, tokens, **options)
    for name, form in forms.items():
        form.save(out / "form" / name)
        again = Form.load(out / "form" / name)
        write_in_form(models[name], again, out / name, max_shard_bytes=10**9)
    return {name: out / name for name in models}, forms


def test_experts_of_other_tokens_types_and_lengths_become_one_model(tmp_path):
    """The whole claim: a forced expert is its dense model, on every token that it knows."""
    law = seeded(tmp_path, "law", seed=1)
    code = recast(seeded(tmp_path, "code", seed=2, max_position_embeddings=64), torch.bfloat16)
    chat = with_tokens(seeded(tmp_path, "chat", seed=3), ["[PAD]", "<|im_start|>"], rows=128)
    models = {"law": law, "code": code, "chat": chat}
    experts, forms = brought(models, tmp_path / "out")
    length = "max_position_embeddings: 128 -> 64, the smallest of all models counts"
    assert length in forms["law"].said
    assert not any(line.startswith("rope") for line in forms["law"].said)
    assert "2 tokens that chat added" in forms["code"].said
    assert changes(experts["code"]) == list(forms["code"].said)
    readers = [CheckpointReader(path) for path in experts.values()]
    assert {info.dtype for r in readers for info in r.tensors.values()} == {torch.float32}
    assert {r.config["vocab_size"] for r in readers} == {128}
    assert {r.config["max_position_embeddings"] for r in readers} == {64}
    assert len({vocabulary_fingerprint(path) for path in experts.values()}) == 1
    write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10**9)
    routers = {layer: torch.randn(32, 3, dtype=torch.float64) for layer in range(2)}
    assemble(
        experts, tmp_path / "backbone", routers, tmp_path / "moe", top_k=1, max_shard_bytes=10**9
    )
    ids = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(5))
    moe = load_causal_lm(tmp_path / "moe")
    for index, path in enumerate(models.values()):
        dense = load_causal_lm(path)
        with torch.no_grad(), force_expert(moe, index):
            ours, theirs = moe(input_ids=ids).logits, dense(input_ids=ids).logits
        assert torch.equal(ours[..., :96], theirs[..., :96])


def test_who_gets_another_tokenizer_keeps_nothing_of_its_own(tmp_path):
    """A template and roles in files that the other has not, or says in its settings."""
    law, code = (seeded(tmp_path, name, seed=i) for i, name in enumerate(("law", "code")))
    (law / "chat_template.jinja").write_text("law's {{ messages }}")
    (law / "special_tokens_map.json").write_text(json.dumps({"eos_token": "!"}))
    (law / "additional_chat_templates").mkdir()
    (law / "additional_chat_templates" / "rag.jinja").write_text("law's")
    with_tokens(code, ["<|im_end|>"])
    settings = json.loads((code / "tokenizer_config.json").read_text())
    settings |= {"chat_template": "code's {{ messages }}", "eos_token": "<|im_end|>"}
    (code / "tokenizer_config.json").write_text(json.dumps(settings))
    experts, _ = brought({"law": law, "code": code}, tmp_path / "out")
    assert tokenizer_files(experts["law"]) == tokenizer_files(code)
    found = load_tokenizer(experts["law"])
    assert found.chat_template == "code's {{ messages }}"
    assert found.eos_token == "<|im_end|>"


def test_tied_and_untied_heads_and_weights_of_several_types_become_one_model(tmp_path):
    """As an adapter of the head leaves a model untied, and a merge leaves norms in fp32."""
    tied = seeded(tmp_path, "tied", seed=1, tie_word_embeddings=True)
    untied = recast(seeded(tmp_path, "untied", seed=2, tie_word_embeddings=True), torch.bfloat16)
    weights = load_file(untied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    norms = {name: tensor.float() for name, tensor in weights.items() if "norm" in name}
    save_file(weights | norms, untied / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": False}
    (untied / "config.json").write_text(json.dumps(config))
    models = {"tied": tied, "untied": untied}
    experts, forms = brought(models, tmp_path / "out")
    assert "tie_word_embeddings: True -> False" in forms["tied"].said
    assert "weights of bfloat16 and float32 -> float32" in forms["untied"].said
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10**9)
    routers = {layer: torch.randn(32, 2, dtype=torch.float64) for layer in range(2)}
    assemble(
        experts, tmp_path / "backbone", routers, tmp_path / "moe", top_k=1, max_shard_bytes=10**9
    )
    ids = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(5))
    moe = load_causal_lm(tmp_path / "moe")
    for index, path in enumerate(models.values()):
        dense = load_causal_lm(path)
        with torch.no_grad(), force_expert(moe, index):
            assert torch.equal(moe(input_ids=ids).logits, dense(input_ids=ids).logits)


def test_a_model_of_several_types_alone_is_written_in_one(tmp_path):
    mixed = seeded(tmp_path, "mixed", seed=1)
    weights = load_file(mixed / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    save_file(weights, mixed / "model.safetensors", metadata={"format": "pt"})
    for asked, dtype in {"auto": torch.float32, "bf16": torch.bfloat16}.items():
        found, _ = brought({"mixed": mixed}, tmp_path / asked, dtype=asked)
        tensors = CheckpointReader(found["mixed"]).tensors.values()
        assert {info.dtype for info in tensors} == {dtype}


def test_rows_of_tokens_that_a_model_lacks_are_the_mean_of_those_that_know_them(tmp_path):
    law = seeded(tmp_path, "law", seed=1)
    padded = seeded(tmp_path, "padded", seed=2)
    with_tokens(padded, [], rows=104)
    one = with_tokens(seeded(tmp_path, "one", seed=3), ["[PAD]"], rows=100)
    two = with_tokens(seeded(tmp_path, "two", seed=4), ["[PAD]", "<im>"])
    models = {"law": law, "padded": padded, "one": one, "two": two}
    experts, _ = brought(models, tmp_path / "out")
    for head in ("model.embed_tokens.weight", "lm_head.weight"):
        own = {name: load_file(path / "model.safetensors")[head] for name, path in models.items()}
        new = {n: load_file(path / "model.safetensors")[head] for n, path in experts.items()}
        pad = (own["one"][96] + own["two"][96]) / 2
        for name in ("law", "padded"):
            assert torch.allclose(new[name][96], pad)
            assert torch.equal(new[name][97], own["two"][97])
        assert torch.equal(new["one"][96], own["one"][96])
        assert torch.equal(new["one"][97], own["two"][97])
        assert torch.equal(new["law"][103], own["padded"][103])
        assert torch.allclose(new["law"][98], (own["padded"][98] + own["one"][98]) / 2)
        for name in models:
            assert torch.equal(new[name][:96], own[name][:96])


def test_models_that_agree_are_copied_to_the_byte(tmp_path):
    law, code = (seeded(tmp_path, name, seed=i) for i, name in enumerate(("law", "code")))
    (law / "notes.txt").write_text("stays behind")
    experts, forms = brought({"law": law, "code": code}, tmp_path / "out")
    assert all(form.said == () for form in forms.values())
    expected = tree_digest(law)
    del expected["notes.txt"]
    assert tree_digest(experts["law"]) == expected
    assert changes(experts["law"]) == []


@pytest.mark.parametrize(
    ("types", "asked", "expected"),
    [
        (("bf16", "bf16"), "auto", "bfloat16"),
        (("bf16", "fp32"), "auto", "float32"),
        (("bf16", "fp16"), "auto", "float32"),
        (("fp32", "fp32"), "bf16", "bfloat16"),
        (("fp32", "bf16"), "fp16", "float16"),
    ],
)
def test_the_type_is_the_narrowest_that_holds_all_or_the_one_asked_for(
    tmp_path, types, asked, expected
):
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    models = {
        f"m{i}": recast(seeded(tmp_path, f"m{i}", seed=i), kinds[kind])
        for i, kind in enumerate(types)
    }
    experts, _ = brought(models, tmp_path / "out", dtype=asked)
    for name, path in experts.items():
        reader = CheckpointReader(path)
        assert {str(info.dtype) for info in reader.tensors.values()} == {f"torch.{expected}"}
        source = CheckpointReader(models[name])
        tensor = "model.layers.0.mlp.up_proj.weight"
        cast = source.tensor(tensor).to(getattr(torch, expected))
        assert torch.equal(reader.tensor(tensor), cast)
        assert AutoModelForCausalLM.from_pretrained(path).dtype == getattr(torch, expected)


def test_strangers_untie_and_take_the_anchors_rope(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    law = save_pico(tmp_path / "law", tie_word_embeddings=True)
    code = save_pico(tmp_path / "code", seed=1, vocab_size=90, rope_parameters=rope)
    readers = {"law": CheckpointReader(law), "code": CheckpointReader(code)}
    refused = compare_strangers(readers, ())
    assert [fault.field for fault in refused] == ["code.config.rope_parameters"]
    assert "symphony.rope: anchor" in str(refused[0])
    assert compare_strangers(readers, (), one_rope=False) == []
    forms = common_forms(readers, {}, rope_of="law")
    ids = torch.arange(40)[None]
    for name, source in (("law", law), ("code", code)):
        out = tmp_path / "out" / name
        write_in_form(source, forms[name], out, max_shard_bytes=10**9)
        new = load_causal_lm(out)
        assert not new.config.tie_word_embeddings
        assert new.config.rope_parameters["rope_theta"] == 1e4
        old = load_causal_lm(source)
        with torch.no_grad():
            same = torch.equal(new(input_ids=ids).logits, old(input_ids=ids).logits)
        assert same == (name == "law")
    assert any("rope_parameters" in line for line in forms["code"].said)


def test_the_anchors_rope_is_not_undone_by_a_first_length_beside_it(tmp_path):
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    law = save_pico(tmp_path / "law", rope_parameters=rope)
    code = save_pico(tmp_path / "code", seed=1)
    config = json.loads((code / "config.json").read_text())
    (code / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": 16}))
    readers = {"law": CheckpointReader(law), "code": CheckpointReader(code)}
    form = common_forms(readers, {}, rope_of="law")["code"]
    write_in_form(code, form, tmp_path / "out", max_shard_bytes=10**9)
    rotary = [load_causal_lm(path).model.rotary_emb.inv_freq for path in (law, tmp_path / "out")]
    assert torch.equal(*rotary)


def test_a_rope_that_took_its_first_length_from_the_config_keeps_it(tmp_path):
    """yarn: original_max_position_embeddings is the config's length where nothing is said."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    law = seeded(tmp_path, "law", seed=1, rope_parameters=rope)
    said = rope | {"original_max_position_embeddings": 128}
    code = seeded(tmp_path, "code", seed=2, max_position_embeddings=64, rope_parameters=said)
    for path in (law, code):  # as published: without what the stock class fills in
        config = json.loads((path / "config.json").read_text())
        config["rope_parameters"] = rope if path == law else said
        (path / "config.json").write_text(json.dumps(config))
    experts, _ = brought({"law": law, "code": code}, tmp_path / "out")
    ids = torch.arange(60)[None]
    for name, path in (("law", law), ("code", code)):
        new, old = load_causal_lm(experts[name]), load_causal_lm(path)
        assert new.config.max_position_embeddings == 64
        with torch.no_grad():
            assert torch.equal(new(input_ids=ids).logits, old(input_ids=ids).logits)


def test_a_tokenizer_beyond_the_embedding_is_refused(tmp_path):
    law = seeded(tmp_path, "law", seed=1)
    shutil.rmtree(tmp_path / "words", ignore_errors=True)
    save_pico_tokenizer(law, 120)
    found = compare_experts({"law": CheckpointReader(law)}, {"law": token_ids(law)})
    assert [fault.field for fault in found] == ["law.tokenizer"]
