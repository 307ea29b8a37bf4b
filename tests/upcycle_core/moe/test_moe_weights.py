"""The weights of a token's experts, against a forward pass that is written out (DUME, Eq. 4)."""

import json

import pytest
import torch
from torch import nn

from tests.pico import save_pico
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers


class Mixed(nn.Module):
    """sum_{i in top-k} g_i(x) FFN_i(x), g the softmax over all experts: token by token."""

    def __init__(self, ffns, router_HD, top_k, *, normalise):
        super().__init__()
        self.ffns, self.router_HD = ffns, router_HD
        self.top_k, self.normalise = top_k, normalise

    def forward(self, x_BSH):
        def mixed(x_H):
            g_D = (x_H @ self.router_HD).softmax(0)
            best = g_D.argsort(descending=True)[: self.top_k]
            total = g_D[best].sum() if self.normalise else 1.0
            return sum(g_D[i] / total * self.ffns[i](x_H) for i in best)

        return torch.stack([torch.stack([mixed(x_H) for x_H in row]) for row in x_BSH])


def parts(root, family):
    experts = {name: save_pico(root / name, family, seed=n) for n, name in enumerate("abc")}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, root / "backbone", max_shard_bytes=10**9)
    routers = {layer: 20 * w for layer, w in random_routers(2, 32, 3, seed=0).items()}
    return experts, root / "backbone", routers


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2"])
@pytest.mark.parametrize(("top_k", "normalise"), [(1, False), (2, False), (2, True)])
def test_transformers_weighs_experts_as_the_recipe_says(family, top_k, normalise, tmp_path):
    experts, backbone, routers = parts(tmp_path, family)
    out = tmp_path / "moe"
    settings = {"top_k": top_k, "normalise": normalise, "max_shard_bytes": 10**9}
    assemble(experts, backbone, routers, out, **settings)
    assert json.loads((out / "config.json").read_text())["norm_topk_prob"] is normalise
    dense = [load_stitched(backbone, path) for path in experts.values()]
    ours = load_stitched(backbone, experts["a"])
    for layer, router_HD in routers.items():
        ffns = [model.model.layers[layer].mlp for model in dense]
        ours.model.layers[layer].mlp = Mixed(ffns, router_HD.float(), top_k, normalise=normalise)
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, found = ours(ids).logits, load_causal_lm(out)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "ernie4_5"])
def test_an_architecture_that_always_normalises_is_refused(family, tmp_path):
    experts, backbone, routers = parts(tmp_path, family)
    settings = {"top_k": 2, "normalise": False, "max_shard_bytes": 10**9}
    with pytest.raises(InputError, match=r"moe.normalise_top_k = False: .* always divides"):
        assemble(experts, backbone, routers, tmp_path / "moe", **settings)
    assert not (tmp_path / "moe").exists()
