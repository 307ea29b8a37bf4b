import math
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.baselines.dense import (
    COMMON,
    WIDTH,
    average,
    dense_models,
    logits_of,
    weights_of,
)
from upcycle_core.backbone.average import write_backbone
from upcycle_core.baselines.config import Baseline
from upcycle_core.baselines.mixture import copies_of, reinitialise, with_seed, write_mixture
from upcycle_core.baselines.start import write_start
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.moe.random import random_routers

PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def expert_of(weights, layer: int, expert: int) -> dict[str, torch.Tensor]:
    """One expert's matrices, neurons first: [I, H] each."""
    prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
    found = {old: weights[f"{prefix}.{new}.weight"] for old, new in PARTS.items()}
    return found | {"down_proj": found["down_proj"].T}


def ffn_of(weights, layer: int) -> dict[str, torch.Tensor]:
    """A dense model's matrices, neurons first."""
    found = {part: weights[f"model.layers.{layer}.mlp.{part}.weight"] for part in PARTS}
    return found | {"down_proj": found["down_proj"].T}


def changed(old_IH: torch.Tensor, new_IH: torch.Tensor) -> list[int]:
    """Neurons whose weights are others."""
    return [i for i in range(len(old_IH)) if not torch.equal(old_IH[i], new_IH[i])]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_copies_compute_what_the_dense_model_does(tmp_path, family, tied):
    model = save_pico(tmp_path / "d", family, intermediate_size=WIDTH, tie_word_embeddings=tied)
    write_mixture(copies_of(model, 3), tmp_path / "moe", top_k=2, **COMMON)
    expected = logits_of(load_causal_lm(model))
    found = logits_of(load_causal_lm(tmp_path / "moe"))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copies_are_exact_and_the_rest_is_taken_over(tmp_path, dtype):
    model = save_pico(tmp_path / "dense")
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(model)
    write_mixture(copies_of(model, 3), tmp_path / "moe", top_k=2, **COMMON)
    dense, moe = weights_of(model), weights_of(tmp_path / "moe")
    for name, tensor in dense.items():
        if ".mlp." not in name:
            assert torch.equal(moe[name], tensor), name
    for layer in (0, 1):
        for expert in (0, 1, 2):
            copy = expert_of(moe, layer, expert)
            assert all(torch.equal(copy[p], w) for p, w in ffn_of(dense, layer).items())
    assert {tensor.dtype for tensor in moe.values()} == {dtype}


def test_without_reinitialisation_it_is_sparse_upcycling_byte_for_byte(tmp_path):
    model = save_pico(tmp_path / "dense")
    write_mixture(copies_of(model, 3), tmp_path / "sparse", top_k=2, **COMMON)
    write_mixture(
        copies_of(model, 3), tmp_path / "drop", edit=reinitialise(0.0, 3), top_k=2, **COMMON
    )
    assert tree_digest(tmp_path / "drop") == tree_digest(tmp_path / "sparse")


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_the_three_matrices_share_the_neurons_that_are_new(tmp_path, share):
    model = save_pico(tmp_path / "dense")  # I = 48
    write_mixture(
        copies_of(model, 3), tmp_path / "moe", edit=reinitialise(share, 3), top_k=2, **COMMON
    )
    dense, moe = weights_of(model), weights_of(tmp_path / "moe")
    sets = set()
    for layer in (0, 1):
        for expert in (0, 1, 2):
            old, new = ffn_of(dense, layer), expert_of(moe, layer, expert)
            gate, up, down = (changed(old[part], new[part]) for part in PARTS)
            assert gate == up == down
            assert len(gate) == math.floor(share * 48)
            sets.add(tuple(gate))
    assert len(sets) == (1 if share == 1 else 6)
    load_causal_lm(tmp_path / "moe")


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_new_weights_have_the_statistics_of_those_they_replace(part):
    torch.manual_seed(0)
    # Neuron i has mean 10 i and deviation i + 1: other neurons would give other statistics.
    scale_I1 = torch.arange(8.0)[:, None]
    old_IH = 10 * scale_I1 + (scale_I1 + 1) * torch.randn(8, 4096)
    weight = old_IH.T.contiguous() if part == "down" else old_IH
    before = weight.clone()
    new = reinitialise(0.5, seed=1)(2, 1, part, weight)
    assert torch.equal(weight, before)
    new_IH = new.T if part == "down" else new
    chosen = changed(old_IH, new_IH)
    assert len(chosen) == 4
    replaced = [value for i in chosen for value in old_IH[i].tolist()]
    mu, sigma = statistics.fmean(replaced), statistics.pstdev(replaced)
    assert abs(mu - old_IH.mean()) > 3  # not the whole matrix's
    for i in chosen:  # one pair for all of them: five standard errors
        assert abs(new_IH[i].mean() - mu) < 5 * sigma / 64
        assert abs(new_IH[i].std() - sigma) < 5 * sigma / (64 * 2**0.5)
    assert abs(new_IH[chosen].sub(mu).div(sigma).pow(4).mean() - 3) < 0.3  # a normal's kurtosis


def test_draws_do_not_depend_on_the_order_of_calls():
    torch.manual_seed(0)
    weights = {"gate": torch.randn(16, 8), "up": torch.randn(16, 8), "down": torch.randn(8, 16)}
    keys = [(layer, expert, part) for layer in (0, 1) for expert in (0, 1) for part in weights]
    edits = reinitialise(0.5, seed=1), reinitialise(0.5, seed=1)
    first = {key: edits[0](*key, weights[key[2]]) for key in keys}
    second = {key: edits[1](*key, weights[key[2]]) for key in reversed(keys)}
    assert all(torch.equal(first[key], second[key]) for key in keys)
    other = reinitialise(0.5, seed=2)(*keys[0], weights["gate"])
    assert not torch.equal(first[keys[0]], other)
    assert not torch.equal(first[0, 0, "gate"], first[0, 1, "gate"])
    assert not torch.equal(first[0, 0, "gate"], first[1, 0, "gate"])


def test_the_matrices_of_an_expert_get_different_numbers():
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    edit = reinitialise(1.0, seed=1)
    assert not torch.equal(edit(0, 0, "gate", weight), edit(0, 0, "up", weight))


def test_symphonys_variant_reinitialises_every_model_s_own_ffns(tmp_path):
    models = dense_models(tmp_path)
    write_mixture(
        with_seed(models, None), tmp_path / "moe", edit=reinitialise(0.5, 3), top_k=2, **COMMON
    )
    dense, moe = [weights_of(path) for path in models.values()], weights_of(tmp_path / "moe")
    for expert, own in enumerate(dense):
        old, new = ffn_of(own, 1), expert_of(moe, 1, expert)
        assert [len(changed(old[part], new[part])) for part in PARTS] == [WIDTH // 2] * 3
    name = "model.layers.0.self_attn.o_proj.weight"
    expected = average([own[name] for own in dense])
    torch.testing.assert_close(moe[name], expected, rtol=1e-6, atol=1e-6)


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    one, out = save_pico(tmp_path / "dense"), tmp_path / "out"
    with pytest.raises(InputError, match="copies = 1: must be 2 or more"):
        write_mixture(copies_of(one, 1), out, top_k=1, **COMMON)
    with pytest.raises(InputError, match=r"moe\.top_k = 3"):
        write_mixture(copies_of(one, 2), out, top_k=3, **COMMON)
    with pytest.raises(InputError, match="copies = 0"):
        write_mixture(copies_of(one, 0), out, top_k=1, **COMMON)
    with pytest.raises(InputError, match="must be two or more"):
        write_mixture(with_seed({"law": one}, None), out, top_k=1, **COMMON)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="reinitialised = "):
            write_mixture(copies_of(one, 2), out, edit=reinitialise(share, 0), top_k=1, **COMMON)
    assert not out.exists()


@pytest.mark.parametrize("normalise", [True, False])
def test_dume_plus_begins_with_the_weights_of_experts_that_dume_has(tmp_path, normalise):
    experts = {name: save_pico(tmp_path / name, "qwen3", seed=i) for i, name in enumerate("ab")}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10**9)
    config = readers[0].config
    routers = random_routers(config["num_hidden_layers"], config["hidden_size"], 2, seed=0)
    write_start(
        Baseline(method="dume"),
        tmp_path / "moe",
        copies=2,
        seed=0,
        max_shard_bytes=10**9,
        experts=experts,
        backbone=tmp_path / "backbone",
        routers=routers,
        normalise=normalise,
    )
    assert CheckpointReader(tmp_path / "moe").config["norm_topk_prob"] is normalise
