"""The shared backbone: each kind of tensor by each choice, against sums written out by hand."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.pico import save_pico
from tests.upcycle_core.backbone.sphere import arc, karcher
from tests.upcycle_core.symphony.disparate import END, RULING, save_disparate, united, weights_of
from tests.vocabularies import TEXTS, core_of, tokens_of
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.slerp import slerp, spherical_mean
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.symphony.config import MergeConfig
from upcycle_core.symphony.merge import LENGTH, agreement_faults, write_merged_backbone
from upcycle_core.symphony.unite import write_united

FAMILIES = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
}
CONFIGS = {
    "the paper's": MergeConfig(),
    "mean": MergeConfig(embeddings="naive", attention="mean", norms="anchor"),
    "slerp": MergeConfig(embeddings="slerp", attention="anchor", norms="slerp"),
    "anchor": MergeConfig(embeddings="anchor", attention="slerp", norms="mean"),
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module", params=FAMILIES)
def three(request, tmp_path_factory) -> dict[str, Path]:
    family, overrides = FAMILIES[request.param]
    return save_disparate(tmp_path_factory.mktemp(request.param), family, **overrides)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory) -> dict[str, Path]:
    return save_disparate(tmp_path_factory.mktemp("llamas"))


def merge(
    models, out: Path, config: MergeConfig | None = None, *, anchor: str = "alpha", union=None
):
    """What is written of ``models``, under the union that ``RULING`` rules."""
    union = union or united(models, RULING if RULING in models else min(models))
    write_merged_backbone(
        models, union, out, config=config or MergeConfig(), anchor=anchor, max_shard_bytes=20_000
    )
    return weights_of(out)


def along_sphere(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """On the flattened tensors, in fp64."""
    flat = [tensor.double().flatten() for tensor in tensors]
    shares = [weight / sum(weights) for weight in weights]
    result = arc(*flat, shares[1]) if len(flat) == 2 else karcher(flat, shares)[1]
    return result.reshape(tensors[0].shape)


def by_hand(how: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """A tensor of one kind; the anchor is the first."""
    if how == "anchor":
        return tensors[0].double()
    if how == "slerp":
        return along_sphere(tensors, weights)
    return sum(w * v.double() for w, v in zip(weights, tensors, strict=True)) / sum(weights)


def rows_by_hand(how: str, matrices: Sequence[Tensor], tables, weights) -> dict[bytes, Tensor]:
    """The row of every token, found by its bytes."""
    everyone = sorted(set.intersection(*map(set, tables)))
    stacked = [m[[t[text] for text in everyone]] for m, t in zip(matrices, tables, strict=True)]
    sphere = along_sphere(stacked, weights) if how == "slerp" else None
    found = {}
    for text in set().union(*tables):
        owners = [i for i, table in enumerate(tables) if text in table]
        rows = [matrices[i][tables[i][text]].double() for i in owners]
        shares = [weights[i] for i in owners]
        if how == "anchor" and owners[0] == 0:
            found[text] = rows[0]
        elif how == "slerp" and text in everyone:
            found[text] = sphere[everyone.index(text)]
        elif how == "naive":
            found[text] = sum(w * r for w, r in zip(shares, rows, strict=True)) / sum(weights)
        else:
            found[text] = by_hand("mean", rows, shares)
    return found


@pytest.mark.parametrize("choice", CONFIGS)
@pytest.mark.parametrize("weights", [{}, {"beta": 2.5, "gamma": 0.5}])
@pytest.mark.parametrize("count", [2, 3])
def test_every_kind_is_merged_as_it_was_chosen(tmp_path, three, choice, weights, count):
    models = dict(list(three.items())[:count])
    config = replace(CONFIGS[choice], weights={n: w for n, w in weights.items() if n in models})
    result = merge(models, tmp_path / "out", config)
    sources = [weights_of(directory) for directory in models.values()]
    shares = [weights.get(name, 1.0) for name in models]
    tables = [tokens_of(directory) for directory in models.values()]
    union = tokens_of(tmp_path / "out")
    assert set(result) == {name for name in sources[0] if ".mlp." not in name}
    for name, tensor in result.items():
        tensors = [source[name] for source in sources]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = rows_by_hand(config.embeddings, tensors, tables, shares)
            assert set(rows) == set(union)
            expected = torch.stack([rows[t] for t in sorted(union, key=union.__getitem__)])
        else:
            matrix = name.endswith("_proj.weight")
            expected = by_hand(config.attention if matrix else config.norms, tensors, shares)
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=2e-6, msg=name)


def test_rows_and_tensors_that_one_model_decides_are_its_own_bit_for_bit(tmp_path, three):
    config = MergeConfig(attention="anchor", norms="anchor", weights={"alpha": 0.3, "beta": 0.9})
    result = merge(three, tmp_path / "out", config, anchor="gamma")
    gamma = weights_of(three["gamma"])
    tables = {name: tokens_of(directory) for name, directory in three.items()}
    union = tokens_of(tmp_path / "out")
    for name, tensor in result.items():
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(tensor, gamma[name])
            continue
        for model, table in tables.items():
            alone = set(table).difference(*(tables[n] for n in tables if n != model))
            assert alone
            for text in alone:
                own = weights_of(three[model])[name][table[text]]
                assert torch.equal(tensor[union[text]], own)


def test_two_models_meet_by_slerp_to_the_bit_and_three_by_their_spherical_mean(tmp_path, llamas):
    weights = {"alpha": 0.7, "beta": 0.2, "gamma": 0.4}
    both = {name: llamas[name] for name in ("beta", "alpha")}
    pair = MergeConfig(norms="slerp", weights={name: weights[name] for name in both})
    two = merge(both, tmp_path / "two", pair)
    three = merge(llamas, tmp_path / "three", replace(pair, weights=weights))
    alpha, beta, gamma = (weights_of(directory) for directory in llamas.values())
    for name in two.keys() - {"model.embed_tokens.weight", "lm_head.weight"}:
        assert torch.equal(two[name], slerp(alpha[name], beta[name], 0.2 / (0.7 + 0.2)))
        trio = [alpha[name], beta[name], gamma[name]]
        assert torch.equal(three[name], spherical_mean(trio, list(weights.values())))


def test_models_of_one_vocabulary_are_averaged_as_experts_of_one_seed_are(tmp_path):
    models = {str(i): save_pico(tmp_path / str(i), "qwen2", seed=i) for i in range(3)}
    means = MergeConfig(attention="mean")
    result = merge(models, tmp_path / "out", means, anchor="0")
    readers = [CheckpointReader(directory) for directory in models.values()]
    write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10**9)
    expected = weights_of(tmp_path / "backbone")
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("choice", CONFIGS)
def test_the_order_of_the_models_changes_no_bit(tmp_path, llamas, choice):
    config = replace(CONFIGS[choice], weights={"alpha": 0.3, "beta": 0.1, "gamma": 0.6})
    digests = set()
    for order in itertools.permutations(llamas):
        out = tmp_path / "-".join(order)
        merge({name: llamas[name] for name in order}, out, config)
        digests.add(json.dumps(tree_digest(out)))
    assert len(digests) == 1


@pytest.mark.parametrize("choice", CONFIGS)
def test_one_model_stays_as_it_is(tmp_path, three, choice):
    config = replace(CONFIGS[choice], weights={"beta": 0.3})
    beta = {"beta": three["beta"]}
    result = merge(beta, tmp_path / "out", config, anchor="beta")
    own = weights_of(three["beta"])
    tokens = len(tokens_of(three["beta"]))
    for name, tensor in result.items():
        expected = own[name][:tokens] if tensor.ndim == 2 and "_proj" not in name else own[name]
        assert torch.equal(tensor, expected)


def test_a_model_of_weight_zero_gives_only_what_no_other_has(tmp_path, llamas):
    config = MergeConfig(embeddings="slerp", norms="slerp", weights={"beta": 0.0})
    three = merge(llamas, tmp_path / "three", config, union=united(llamas, "alpha"))
    two = {name: llamas[name] for name in ("alpha", "gamma")}
    pair = merge(two, tmp_path / "two", replace(config, weights={}))
    places = [tokens_of(tmp_path / name) for name in ("three", "two")]
    table, beta = tokens_of(llamas["beta"]), weights_of(llamas["beta"])
    for name, tensor in three.items():
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(tensor, pair[name])
            continue
        for text, at in places[0].items():
            own = pair[name][places[1][text]] if text in places[1] else beta[name][table[text]]
            assert torch.equal(tensor[at], own)


def test_configuration_and_tokenizer_are_the_ruling_models_for_the_union(tmp_path, llamas):
    merge(llamas, tmp_path / "out")
    union = tokens_of(tmp_path / "out")
    read = [json.loads((d / "config.json").read_text()) for d in (llamas[RULING], tmp_path / "out")]
    assert read[1] == read[0] | {"vocab_size": len(union)}
    special = {key: read[0][key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert special.items() <= generation.items()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == len(union)
    assert tokenizer.eos_token_id == special["eos_token_id"] == union[END.encode()]
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == core_of(llamas[RULING]).encode(text).ids


@pytest.mark.parametrize("has_file", [True, False])
def test_special_ids_that_are_no_token_of_the_ruling_model_are_none(tmp_path, llamas, has_file):
    models = {name: shutil.copytree(llamas[name], tmp_path / name) for name in llamas}
    config = json.loads((models[RULING] / "config.json").read_text())
    rows, end = config["vocab_size"], config["eos_token_id"]
    union = united(models)
    assert rows - 1 == len(tokens_of(models[RULING])) < len(union.tokens)  # one row is padding
    # A row that pads the matrices has another model's token in the union; the other id has no row.
    ids = {"bos_token_id": rows - 1, "eos_token_id": [end, 4096], "pad_token_id": 4096}
    (models[RULING] / "config.json").write_text(json.dumps(config | ids))
    generation = models[RULING] / "generation_config.json"
    generation.write_text(json.dumps({"top_p": 0.5, "pad_token_id": 4096, "eos_token_id": end}))
    if not has_file:
        generation.unlink()
    left_out = write_merged_backbone(
        models,
        union,
        tmp_path / "out",
        config=MergeConfig(),
        anchor="alpha",
        max_shard_bytes=20_000,
    )
    assert left_out == ids
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {"bos_token_id": None, "eos_token_id": [end], "pad_token_id": None}
    assert written == config | expected | {"vocab_size": len(union.tokens)}
    told = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    if has_file:
        assert told == {"top_p": 0.5, "pad_token_id": None, "eos_token_id": end}
    else:
        assert told == {"_from_model_config": True, **expected}
    write_united(models["alpha"], tmp_path / "out", tmp_path / "lifted", max_shard_bytes=20_000)
    AutoModelForCausalLM.from_pretrained(tmp_path / "lifted")


def faults_of(*args, **kwargs) -> list[str]:
    with pytest.raises(InputError) as error:
        merge(*args, **kwargs)
    return [str(fault) for fault in error.value.faults]


def test_names_of_no_model_and_a_union_of_others_are_found_together(tmp_path, llamas):
    two = {name: llamas[name] for name in ("alpha", "beta")}
    config = MergeConfig(weights={"delta": 1.0, "alpha": -1.0})
    union = united(llamas)
    two["beta"] = tmp_path / "nothing"
    said = faults_of(two, tmp_path / "out", config, anchor="gamma", union=union)
    assert list(dict.fromkeys(fault.split(" = ")[0] for fault in said)) == [
        "symphony.merge.weights.delta",
        "symphony.anchor",
        "experts",
        "symphony.merge.weights",
        "experts.beta",
    ]
    assert "the models are alpha, beta" in said[0]
    assert "which is of 3" in said[2]
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_are_named_with_all_that_differs(tmp_path, llamas):
    models, union = dict(llamas), united(llamas)
    vocabulary = CheckpointReader(llamas["beta"]).config["vocab_size"]
    shape = {"seed": 5, "vocab_size": vocabulary}
    models["beta"] = save_pico(tmp_path / "b", tie_word_embeddings=True, rms_norm_eps=1e-3, **shape)
    models["gamma"] = save_pico(tmp_path / "g", "qwen2", seed=6, vocab_size=400)
    said = faults_of(models, tmp_path / "out", union=union)
    assert [fault.split(" = ")[0] for fault in said] == [
        "experts.beta.config.rms_norm_eps",
        "experts.beta.config.tie_word_embeddings",
        "experts.gamma.config.model_type",
    ]
    assert "differs from experts.alpha (False); use models whose lm_head is tied, or" in said[1]
    models["gamma"] = llamas["gamma"]
    models["beta"] = save_pico(tmp_path / "short", seed=5, vocab_size=vocabulary - 20)
    (said,) = faults_of(models, tmp_path / "out", union=union)
    assert said.startswith("experts.beta = ")
    assert f"none for token {vocabulary - 2} of its tokenizer" in said
    assert not (tmp_path / "out").exists()


def test_missing_tensors_are_named(tmp_path, llamas):
    models = dict(llamas)
    models["beta"] = changed(llamas["beta"], tmp_path / "beta", lambda all_: all_.pop(Q_PROJ))
    [said] = faults_of(models, tmp_path / "out")
    assert said.startswith("experts.beta = ")
    assert f"lacks tensor {Q_PROJ}" in said


@pytest.mark.parametrize("narrow", ["alpha", "gamma"])
def test_models_of_two_types_are_merged_in_the_wider(tmp_path, llamas, narrow):
    """As if the narrow one had been saved in the wider type, whichever comes first."""
    half = changed(llamas[narrow], tmp_path / "half", halved)
    same = changed(half, tmp_path / "same", widened)
    config = MergeConfig(attention="mean", norms="anchor")
    mixed = merge({**llamas, narrow: half}, tmp_path / "mixed", config)
    expected = merge({**llamas, narrow: same}, tmp_path / "expected", config)
    assert mixed.keys() == expected.keys()
    for name, tensor in mixed.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == torch.float32
    assert config_of(tmp_path / "mixed") == config_of(tmp_path / "expected")
    lifted = [tmp_path / f"lifted-{d}" for d in ("mixed", "expected")]
    for model, backbone, out in zip((half, same), ("mixed", "expected"), lifted, strict=True):
        write_united(model, tmp_path / backbone, out, max_shard_bytes=20_000)
    one, other = map(weights_of, lifted)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("short", ["alpha", "gamma"])
def test_the_shortest_length_is_that_of_all(tmp_path, llamas, short):
    least = min(config_of(model)[LENGTH] for model in llamas.values()) // 2
    models = {**llamas, short: shutil.copytree(llamas[short], tmp_path / short)}
    changed_config = {**config_of(models[short]), LENGTH: least}
    (models[short] / "config.json").write_text(json.dumps(changed_config))
    merged = merge(models, tmp_path / "out")
    before = merge(llamas, tmp_path / "before")
    assert all(torch.equal(merged[name], before[name]) for name in before)
    content, was = config_of(tmp_path / "out"), config_of(tmp_path / "before")
    assert content[LENGTH] == least
    rope = {"rope_parameters", "rope_theta", "rope_scaling", LENGTH}
    assert {n: v for n, v in content.items() if n not in rope} == {
        n: v for n, v in was.items() if n not in rope
    }
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    write_united(models["beta"], tmp_path / "out", tmp_path / "lifted", max_shard_bytes=20_000)


def config_of(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def changed(model: Path, out: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a checkpoint whose weights went through ``change``."""
    shutil.copytree(model, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors")
    return out


def halved(weights: dict[str, Tensor]) -> None:
    for name in weights:
        weights[name] = weights[name].bfloat16()


def widened(weights: dict[str, Tensor]) -> None:
    for name in weights:
        weights[name] = weights[name].float()


def test_bf16_models_are_merged_in_fp32_and_rounded_once(tmp_path, llamas):
    models = {name: changed(model, tmp_path / name, halved) for name, model in llamas.items()}
    config = MergeConfig(attention="mean", weights={"gamma": 3.0})
    result = merge(models, tmp_path / "out", config)
    alpha, beta, gamma = (weights_of(directory) for directory in models.values())
    for name in result.keys() - {"model.embed_tokens.weight", "lm_head.weight"}:
        parts = [w[name].float() for w in (alpha, beta, gamma)]
        expected = ((parts[0] + parts[1] + 3 * parts[2]) / 5).bfloat16()
        assert torch.equal(result[name], expected), name


def test_settings_that_are_one_number_in_fp32_agree(tmp_path):
    """A converter writes 9.999999974752427e-07 for 1e-06."""
    for name, eps in (("a", 1e-6), ("b", 9.999999974752427e-07), ("c", 1e-5)):
        save_pico(tmp_path / name, rms_norm_eps=eps)
    first, same, other = (CheckpointReader(tmp_path / name, field=name) for name in "abc")
    assert agreement_faults(same, first) == []
    (fault,) = agreement_faults(other, first)
    assert fault.field == "c.config.rms_norm_eps"
