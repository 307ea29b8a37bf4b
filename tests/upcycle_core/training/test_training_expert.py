"""Training in part: what is frozen stays to the last bit; an adapter is merged as by peft."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.training.runs import RandomRows, settings
from upcycle_core.architectures.families import family_of
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent
from upcycle_core.training.config import ExpertTrainingConfig, LoraSettings
from upcycle_core.training.expert import add_adapter, train_expert


@pytest.fixture
def model(tmp_path):
    return save_pico(tmp_path / "seed")


def config(**changes):
    plain = vars(settings(checkpoint_steps=3))
    return ExpertTrainingConfig(**{**plain, **changes})


def trained(model, out, **changes):
    return train_expert(
        model,
        RandomRows(100),
        out,
        config=config(**changes),
        seed=0,
        checkpoints=out.with_suffix(".checkpoints"),
        progress=Silent(),
        device="cpu",
    )


def weights(directory):
    return load_file(directory / "model.safetensors")


def test_ffn_trains_the_ffns_alone(tmp_path, model):
    result = trained(model, tmp_path / "out", method="ffn")
    before, after = weights(model), weights(tmp_path / "out")
    family = family_of(json.loads((model / "config.json").read_text()))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if family.is_ffn(name)}
    assert result.trained_parameters == sum(before[name].numel() for name in changed)


def test_layers_trains_all_but_embeddings_and_head(tmp_path, model):
    result = trained(model, tmp_path / "out", method="layers")
    before, after = weights(model), weights(tmp_path / "out")
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {"model.embed_tokens.weight", "lm_head.weight"} & set(before)
    assert result.trained_parameters == sum(
        tensor.numel() for name, tensor in before.items() if name not in kept
    )


def test_lora_is_published_merged_with_the_adapter_beside(tmp_path, model):
    lora = LoraSettings(rank=2, alpha=3, modules=("q_proj", "up_proj"))
    result = trained(model, tmp_path / "out", method="lora", lora=lora)
    # A [2, 32] and B of q [32, 2] and up [48, 2], in two layers.
    assert result.trained_parameters == 2 * (2 * (32 + 32) + 2 * (32 + 48))
    before, after = weights(model), weights(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "up_proj"}
    assert len(changed) == 4
    base = AutoModelForCausalLM.from_pretrained(model)
    merged = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").merge_and_unload()
    for name, tensor in merged.state_dict().items():
        assert torch.equal(after[name], tensor), name
    assert str(tmp_path) not in (tmp_path / "out" / "adapter" / "adapter_config.json").read_text()


def test_a_head_with_an_adapter_keeps_its_weights_as_they_were(tmp_path, model):
    """It is frozen in bf16 beside its adapter, and what is merged into is the model's fp32."""
    lora = LoraSettings(rank=2, alpha=3, modules=("self_attn.q_proj", "lm_head"))
    trained(model, tmp_path / "out", method="lora", precision="bf16", lora=lora)
    tensors = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in tensors)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").merge_and_unload()
    after = weights(tmp_path / "out")
    for name, tensor in merged.state_dict().items():
        assert torch.equal(after[name], tensor), name


def test_lora_learns(tmp_path, model):
    result = trained(model, tmp_path / "out", method="lora", steps=30, learning_rate=0.02)
    losses = [point["loss"] for point in result.curves if "loss" in point]
    assert losses[-1] < losses[0]


def test_equal_trainings_give_equal_bytes_after_a_kill_too(tmp_path, model):
    for name in ("a", "b"):
        trained(model, tmp_path / name, method="lora")
    (tmp_path / "c.checkpoints").mkdir()
    (tmp_path / "a.checkpoints" / "checkpoint-3").rename(
        tmp_path / "c.checkpoints" / "checkpoint-3"
    )
    trained(model, tmp_path / "c", method="lora")
    files = {p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()}
    for name in ("b", "c"):
        for file in files:
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / name / file).read_bytes()


def test_the_result_has_the_seeds_type(tmp_path, model):
    half = tmp_path / "half"
    save_pico(half)
    AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(half)
    trained(half, tmp_path / "out", method="lora", precision="bf16")
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_frozen_weights_are_bf16_and_trained_ones_fp32(model):
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    state = torch.get_rng_state()
    add_adapter(network, LoraSettings(rank=2), seed=0)
    assert torch.equal(state, torch.get_rng_state())
    types = {p.requires_grad: p.dtype for p in network.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


def test_a_module_that_is_not_there_is_named(tmp_path, model):
    with pytest.raises(InputError, match=r"lora.modules = \['w1'\]: no linear layer is called so"):
        trained(model, tmp_path / "out", method="lora", lora=LoraSettings(modules=("w1",)))


def test_settings_that_do_not_fit_are_named(tmp_path, model):
    with pytest.raises(InputError, match=r"training.lora = 'rank 16': is only trained with"):
        trained(model, tmp_path / "out", method="ffn", lora=LoraSettings())
