"""The second repair, against whole passes and least squares on what each expert is sent."""

import json
import math

import numpy as np
import pytest
import torch
from killed import killed_at
from test_dume_repair import (
    EXACT,
    last_target,
    merged,
    paragraphs_of,
    related,
    repaired,
    slow_head_target,
    slow_solution,
    write_corpus,
)

from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.repair import REPORT
from upcycle_core.dume.routed import repair_routed
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers


@pytest.fixture
def corpora(tmp_path):
    """A text of each domain; their documents are of all lengths, so that batches are padded."""
    draw = np.random.default_rng(0)
    for n in range(2):
        lengths = [(11, 16, 27)[d % 3] for d in range(24 + 6 * n)]
        texts = [(draw.zipf(1.3, length) % 94 + 2, length) for length in lengths]
        write_split(tmp_path / f"text{n}", texts, eos_id=0, vocabulary_size=96)
    return [tmp_path / f"text{n}" for n in range(2)]


def once_repaired(root, experts, corpora, way="down"):
    backbone = merged(experts, root / "backbone")
    names = [f"once{n}" for n in range(len(experts))]
    return backbone, [
        repaired(backbone, expert, corpus, root / name, repair=way)
        for name, expert, corpus in zip(names, experts, corpora, strict=True)
    ]


def twice_repaired(root, backbone, experts, once, corpora, routers, out=None):
    named = [{f"d{n}": path for n, path in enumerate(of)} for of in (experts, once, corpora)]
    settings = {"config": EXACT, "max_shard_bytes": 10**9}
    out = out or root / "twice"
    repair_routed(backbone, *named, routers, out, **settings)
    return [out / name for name in named[0]]


class Sent(torch.nn.Module):
    """An FFN whose every token takes the way of its best expert; one token after another."""

    def __init__(self, ffns, router_HD):
        super().__init__()
        self.ffns, self.router_HD, self.seen = ffns, router_HD, []

    def forward(self, x_BSH):
        made = []
        for x_H in x_BSH[0]:
            best = int((x_H @ self.router_HD).argmax())
            ffn = self.ffns[best]
            inner = ffn.act_fn(ffn.gate_proj(x_H)) * ffn.up_proj(x_H)
            self.seen.append((best, inner))
            made.append(ffn.down_proj(inner))
        return torch.stack(made)[None]


@torch.no_grad()
def slow_routed(backbone, experts, once, corpora, routers):
    """Whole passes for every layer, token by token, least squares on stacked activations."""
    own = [load_causal_lm(expert, dtype=torch.float64) for expert in experts]
    models = [load_stitched(backbone, path, dtype=torch.float64) for path in once]
    moe = load_stitched(backbone, once[0], dtype=torch.float64)
    layers = len(moe.model.layers)
    for layer in range(layers):
        ffns = [model.model.layers[layer].mlp for model in models]
        moe.model.layers[layer].mlp = Sent(ffns, routers[layer].double())
    texts = [paragraphs_of(corpus) for corpus in corpora]
    heads = [last_target(path) == "head" for path in once]
    for layer in range(layers):
        block, best, inner, drift, half = moe.model.layers[layer], [], [], [], []
        for teacher, text, corpus, head in zip(own, texts, corpora, heads, strict=True):
            for part, ids in text:
                block.mlp.seen.clear()
                now, wanted = (leaves(model, layer, ids) for model in (moe, teacher))
                if head and layer == layers - 1:
                    wanted = slow_head_target(teacher, models[0], wanted, corpus)
                drift.append(wanted - now)
                best += [e for e, _ in block.mlp.seen]
                inner += [a for _, a in block.mlp.seen]
                half += [part] * len(ids)
        best, inner, half = torch.tensor(best), torch.stack(inner), torch.tensor(half)
        drift = torch.cat(drift)
        changes = [
            slow_solution(inner[best == e], drift[best == e], half[best == e])[0]
            for e in range(len(models))
        ]
        for model, change in zip(models, changes, strict=True):
            model.model.layers[layer].mlp.down_proj.weight += change.T
    return models


def leaves(model, layer, ids):
    """What a layer leaves of a paragraph."""
    left = []
    hook = model.model.layers[layer].register_forward_hook(lambda m, given, out: left.append(out))
    model.model(ids[None])
    hook.remove()
    return left[0][0]


@pytest.mark.parametrize(("family", "head"), [("llama", True), ("qwen2", False)])
def test_the_second_repair_is_least_squares_on_what_each_expert_is_sent(
    family, head, corpora, tmp_path
):
    experts = related(tmp_path, family)
    way = "down+head_target" if head else "down"
    backbone, once = once_repaired(tmp_path, experts, corpora, way)
    assert ("head" in map(last_target, once)) == head
    routers = random_routers(2, 32, 2, seed=0)
    made = twice_repaired(tmp_path, backbone, experts, once, corpora, routers)
    expected = slow_routed(backbone, experts, once, corpora, routers)
    changed = 0
    for path, before, model in zip(made, once, expected, strict=True):
        weights, old = (load_causal_lm(p, dtype=torch.float64).state_dict() for p in (path, before))
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-5)
            changed += not torch.allclose(weight, old[name], atol=1e-4)
    assert changed >= 1


def test_the_moe_comes_nearer_to_each_tokens_own_expert(corpora, tmp_path):
    experts = related(tmp_path)
    backbone, once = once_repaired(tmp_path, experts, corpora)
    routers = random_routers(2, 32, 2, seed=0)
    twice = twice_repaired(tmp_path, backbone, experts, once, corpora, routers)
    batch = torch.stack([ids for _, ids in paragraphs_of(write_corpus(tmp_path / "other", 9))])
    left = []
    for name, parts in (("one", once), ("two", twice)):
        named = {f"d{n}": part for n, part in enumerate(parts)}
        assemble(named, backbone, routers, tmp_path / name, top_k=1, max_shard_bytes=10**9)
        with torch.no_grad():
            made = load_causal_lm(tmp_path / name)(batch).logits.log_softmax(-1)
            owns = [load_causal_lm(expert)(batch).logits.log_softmax(-1) for expert in experts]
        left.append(sum(float((own.exp() * (own - made)).sum(-1).mean()) for own in owns))
    assert left[1] < left[0]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_experts_that_nothing_was_merged_with_stay(family, corpora, tmp_path):
    (expert,) = related(tmp_path, family, count=1)
    experts = [expert, expert]
    backbone, once = once_repaired(tmp_path, experts, corpora, "down+head_target")
    routers = random_routers(2, 32, 2, seed=0)
    before = load_causal_lm(expert).state_dict()
    for path in twice_repaired(tmp_path, backbone, experts, once, corpora, routers):
        for name, weight in load_causal_lm(path).state_dict().items():
            torch.testing.assert_close(weight, before[name], atol=1e-6, rtol=0)


def test_an_expert_that_is_sent_nothing_stays(corpora, tmp_path):
    experts = related(tmp_path)
    backbone, once = once_repaired(tmp_path, experts, corpora)
    zeros = {
        layer: torch.zeros(32, 2, dtype=torch.float64) for layer in range(2)
    }  # all to the first
    _, last = twice_repaired(tmp_path, backbone, experts, once, corpora, zeros)
    assert [layer["tokens"] for layer in json.loads((last / REPORT).read_text())] == [0, 0]
    for name, weight in load_causal_lm(once[1]).state_dict().items():
        assert torch.equal(load_causal_lm(last).state_dict()[name], weight)


def test_activations_that_are_not_finite_are_named(corpora, tmp_path):
    experts = related(tmp_path)
    backbone, once = once_repaired(tmp_path, experts, corpora)
    model = load_causal_lm(once[0])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    model.save_pretrained(once[0])
    routers = random_routers(2, 32, 2, seed=0)
    with pytest.raises(InputError, match="layer 1's activations"):
        twice_repaired(tmp_path, backbone, experts, once, corpora, routers)


def test_a_killed_second_repair_goes_on_at_its_layer(corpora, tmp_path, monkeypatch):
    experts = related(tmp_path, num_hidden_layers=3)
    backbone, once = once_repaired(tmp_path, experts, corpora, "down+head_target")
    routers = random_routers(3, 32, 2, seed=0)

    def call(out):
        twice_repaired(tmp_path, backbone, experts, once, corpora, routers, out)

    passed, whole, found = killed_at(monkeypatch, 2, call, tmp_path / "out")
    assert passed == [2]
    assert found == whole
