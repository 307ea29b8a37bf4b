"""How many sequences fit, against figures by hand."""

import os

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from upcycle_core.baselines.bam.modeling_bam import BamConfig
from upcycle_core.evaluation.tasks import memory

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
NARROW = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
# Bytes of one position: three copies of 96 logits in fp32; keys and values of 2 layers and 2 heads
# of 8; four of the hidden state and the MLP's units.
CASES = {
    "llama": (LlamaConfig(**SHAPE), 3 * 96 * 4 + 2 * 2 * 2 * 8 * 4 + 4 * (32 + 48) * 4),
    "wide heads": (
        LlamaConfig(**SHAPE, head_dim=16),
        3 * 96 * 4 + 2 * 2 * 2 * 16 * 4 + 4 * (32 + 48) * 4,
    ),
    "mixtral": (
        MixtralConfig(**SHAPE, **EXPERTS),
        3 * 96 * 4 + 2 * 2 * 2 * 8 * 4 + 4 * (32 + 2 * 48) * 4,
    ),
    "bam": (
        BamConfig(**SHAPE, **EXPERTS),
        3 * 96 * 4 + 2 * 2 * 2 * 8 * 4 + 4 * (32 + 2 * 48) * 4,
    ),
    "qwen2_moe": (
        Qwen2MoeConfig(**SHAPE, **NARROW, shared_expert_intermediate_size=24),
        3 * 96 * 4 + 2 * 2 * 2 * 8 * 4 + 4 * (32 + 4 * 16 + 24) * 4,
    ),
    "qwen3_moe": (
        Qwen3MoeConfig(**SHAPE, head_dim=8, **NARROW),
        3 * 96 * 4 + 2 * 2 * 2 * 8 * 4 + 4 * (32 + 4 * 16) * 4,
    ),
}


def model_of(config, dtype=torch.float32):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def fitting(monkeypatch, model, free):
    monkeypatch.setattr(memory, "free_on", lambda device: free)
    return memory.fitting_batch_size(model, "cpu")


@pytest.mark.parametrize("case", CASES)
def test_a_quarter_of_the_free_memory_holds_the_batch(case, monkeypatch):
    config, position = CASES[case]
    model, sequence = model_of(config), 4 * 128 * position
    assert fitting(monkeypatch, model, 8 * sequence) == 8
    assert fitting(monkeypatch, model, 8 * sequence - 4) == 4


def test_half_the_bytes_leave_the_logits_as_they_are(monkeypatch):
    config, _ = CASES["llama"]
    sequence = 4 * 128 * (3 * 96 * 4 + 2 * 2 * 2 * 8 * 2 + 4 * (32 + 48) * 2)
    model = model_of(config, torch.bfloat16)
    assert fitting(monkeypatch, model, 2 * sequence) == 2
    assert fitting(monkeypatch, model, 2 * sequence - 4) == 1


def test_a_model_of_long_texts_is_not_asked_one_prompt_at_a_time(monkeypatch):
    _, position = CASES["llama"]
    model = model_of(LlamaConfig(**{**SHAPE, "max_position_embeddings": 131072}))
    assert fitting(monkeypatch, model, 4 * 16 * 4096 * position) == 16


def test_batches_are_powers_of_two_from_1_to_64(monkeypatch):
    model = model_of(CASES["llama"][0])
    sizes = [fitting(monkeypatch, model, free) for free in range(0, 10**8, 10**5)]
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2, 4, 8, 16, 32, 64}


def test_the_machine_s_free_memory_is_found():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 < memory.free_on("cpu") <= total
