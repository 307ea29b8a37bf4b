"""A MoE's experts are put together once, as transformers' own loader does."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.fused import StockTensors
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers


def moe(root, family):
    experts = {name: save_pico(root / name, family, seed=n) for n, name in enumerate("abc")}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, root / "backbone", max_shard_bytes=10**9)
    routers = random_routers(2, 32, 3, seed=0)
    assemble(experts, root / "backbone", routers, root / "moe", top_k=2, max_shard_bytes=10**9)
    return root / "moe"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_every_family_loads_as_transformers_loads_it(family, dtype, tmp_path):
    checkpoint = moe(tmp_path, family)
    ours = load_causal_lm(checkpoint, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.name_or_path == str(checkpoint)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_every_family_is_saved_as_it_was(family, tmp_path):
    checkpoint = moe(tmp_path, family)
    load_causal_lm(checkpoint).save_pretrained(tmp_path / "saved")
    before, after = CheckpointReader(checkpoint), CheckpointReader(tmp_path / "saved")
    assert after.tensors.keys() == before.tensors.keys()
    for name in before.tensors:
        assert torch.equal(after.tensor(name), before.tensor(name)), name


def test_what_is_put_together_is_what_the_model_holds(tmp_path, monkeypatch):
    checkpoint, made = moe(tmp_path, "llama"), {}
    tensor = StockTensors.tensor

    def remembered(self, name, dtype=None):
        made[name] = tensor(self, name, dtype)
        return made[name]

    monkeypatch.setattr(StockTensors, "tensor", remembered)
    held = load_causal_lm(checkpoint, dtype=torch.bfloat16).state_dict()
    experts = [name for name in held if ".experts." in name]
    assert len(experts) == 4
    assert all(held[name].data_ptr() == made[name].data_ptr() for name in experts)


def test_a_missing_expert_is_named(tmp_path):
    checkpoint = moe(tmp_path, "qwen3")
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts"):
        load_causal_lm(checkpoint)


def test_a_strange_tensor_is_named(tmp_path):
    checkpoint = moe(tmp_path, "mistral")
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), "model.strange": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="strange"):
        load_causal_lm(checkpoint)
