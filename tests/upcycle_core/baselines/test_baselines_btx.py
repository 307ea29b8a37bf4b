import math

import pytest
import torch
from torch.nn import functional

from tests.pico import save_pico
from tests.upcycle_core.baselines.dense import COMMON, average, dense_models, weights_of
from upcycle_core.backbone.average import write_backbone
from upcycle_core.baselines.mixture import with_seed, write_mixture
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.inspect import routers_of
from upcycle_core.moe.random import random_routers


def test_ffns_are_experts_and_the_rest_is_their_mean(tmp_path):
    experts = dense_models(tmp_path)
    write_mixture(experts, tmp_path / "moe", top_k=2, **COMMON)
    found, dense = weights_of(tmp_path / "moe"), [weights_of(path) for path in experts.values()]
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    routers = 0
    for name, tensor in found.items():
        if "experts" in name:
            prefix, _, rest = name.partition(".block_sparse_moe.experts.")
            index, part, _ = rest.split(".")
            old = next(old for old, new in names.items() if new == part)
            assert torch.equal(tensor, dense[int(index)][f"{prefix}.mlp.{old}.weight"])
        elif name.endswith("block_sparse_moe.gate.weight"):
            routers += 1
            assert tensor.shape == (3, 32)
            assert tensor.std() == pytest.approx(0.02, rel=0.3)
        else:
            # The mean is summed in fp32.
            torch.testing.assert_close(
                tensor, average([m[name] for m in dense]), rtol=1e-6, atol=1e-6
            )
    assert routers == 2
    assert len(found) == len(dense[0]) - 2 * 3 + 2 * (3 * 3 + 1)
    assert load_causal_lm(tmp_path / "moe").config.num_experts_per_tok == 2


def test_the_mean_on_the_way_is_the_backbone_that_is_written_alone(tmp_path):
    experts = dense_models(tmp_path, "qwen2")
    write_mixture(experts, tmp_path / "moe", top_k=2, **COMMON)
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10**9)
    routers = random_routers(2, 32, 3, seed=COMMON["router_seed"])
    assemble(
        experts, tmp_path / "backbone", routers, tmp_path / "again", top_k=2, max_shard_bytes=10**9
    )
    assert tree_digest(tmp_path / "moe") == tree_digest(tmp_path / "again")


def slow_moe(block, x_TH: torch.Tensor, top_k: int) -> torch.Tensor:
    """FF_MoE(x) = sum_i g_i(W x) FF_i(x), token by token and expert by expert."""
    rows = []
    for x_H in x_TH:
        logits = [float(row @ x_H) for row in block.gate.weight]
        chosen = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
        normaliser = sum(math.exp(logits[i]) for i in chosen)
        total_H = torch.zeros_like(x_H)
        for i in chosen:
            gate_I, up_I = (block.experts.gate_up_proj[i] @ x_H).chunk(2)
            ffn_H = block.experts.down_proj[i] @ (functional.silu(gate_I) * up_I)
            total_H += math.exp(logits[i]) / normaliser * ffn_H
        rows.append(total_H)
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_layer_computes_the_equation(tmp_path, top_k):
    write_mixture(dense_models(tmp_path), tmp_path / "moe", top_k=top_k, **COMMON)
    model = load_causal_lm(tmp_path / "moe", dtype=torch.float64)
    model.set_experts_implementation("eager")  # the other one has no fp64
    torch.manual_seed(0)
    x_TH = torch.randn(9, 32, dtype=torch.float64)
    for layer in model.model.layers:
        with torch.no_grad():
            found, expected = layer.mlp(x_TH[None])[0], slow_moe(layer.mlp, x_TH, top_k)
        # The routing weights are computed in fp32.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_seed_is_one_more_expert_and_part_of_the_mean(tmp_path):
    experts = dense_models(tmp_path)
    seed = save_pico(tmp_path / "seed", seed=9, intermediate_size=64)
    write_mixture(with_seed(experts, seed), tmp_path / "moe", top_k=2, **COMMON)
    found = weights_of(tmp_path / "moe")
    dense = [weights_of(path) for path in (*experts.values(), seed)]
    name = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(found[name], average([m[name] for m in dense]), rtol=1e-6, atol=1e-6)
    last = found["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    assert torch.equal(last, dense[-1]["model.layers.1.mlp.gate_proj.weight"])
    routers = routers_of(load_causal_lm(tmp_path / "moe"))
    assert [tuple(router.weight.shape) for router in routers] == [(4, 32)] * 2


def test_a_seed_in_bf16_is_an_expert_among_those_that_training_left_in_fp32(tmp_path):
    experts = dense_models(tmp_path)
    whole = save_pico(tmp_path / "whole", seed=9, intermediate_size=64)
    half = load_causal_lm(whole).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    write_mixture(with_seed(experts, tmp_path / "half"), tmp_path / "moe", top_k=2, **COMMON)
    found, own = weights_of(tmp_path / "moe"), dict(half.named_parameters())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    last = found["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    assert torch.equal(last, own["model.layers.1.mlp.gate_proj.weight"].float())
    dense = [weights_of(path) for path in experts.values()]
    name = "model.layers.0.self_attn.k_proj.weight"
    expected = average([*(m[name] for m in dense), own[name].detach().float()])
    torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)


def test_the_router_seed_decides_the_routers_and_nothing_else(tmp_path):
    experts = dense_models(tmp_path)
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        write_mixture(experts, tmp_path / name, top_k=2, router_seed=seed, max_shard_bytes=10**9)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "again")
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    differing = {name for name in one if not torch.equal(one[name], two[name])}
    assert differing == {f"model.layers.{i}.block_sparse_moe.gate.weight" for i in (0, 1)}


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    experts = dense_models(tmp_path, seeds=(0, 1))
    wide = save_pico(tmp_path / "wide", intermediate_size=96)
    out = tmp_path / "out"
    with pytest.raises(InputError, match="must be two or more"):
        write_mixture(with_seed({"law": experts["domain0"]}, None), out, top_k=1, **COMMON)
    with pytest.raises(InputError, match=r"moe\.top_k = 3"):
        write_mixture(experts, out, top_k=3, **COMMON)
    with pytest.raises(InputError, match=r"experts\.wide"):
        write_mixture({**experts, "wide": wide}, out, top_k=2, **COMMON)
    assert not out.exists()
