"""What does not fit the memory is refused from headers: of Llama-3.1-8B, without its weights."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from infra.cluster import memory
from tasks.data import fits
from tasks.data.fits import memory_faults
from tasks.recipes import validate
from upcycle_core.checkpoints.reader import CheckpointReader

PARAMETERS, FFNS = 8_030_261_248, 32 * 3 * 4096 * 14336
DOMAINS = ("law", "code", "history", "music", "art")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> CheckpointReader:
    """Headers as published; the file behind them is a hole."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            n: t.shape for n, t in AutoModelForCausalLM.from_config(config).named_parameters()
        }
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    said = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        file.truncate(8 + len(said) + end)
    return CheckpointReader(folder)


def faults(monkeypatch, llama, gigabytes, *, method="full", cpus=1, **sections):
    """{field: remedy} of five experts of that seed, on a machine of so much memory."""
    monkeypatch.setattr(fits, "machine_memory", lambda device: int(gigabytes * 1e9))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    values = {
        "name": "large",
        "domains": {name: {"train": {"files": [f"{name}.txt"]}} for name in DOMAINS},
        "seed_model": {"model": str(llama.directory)},
        "experts": {"training": {"method": method, "precision": "bf16"}},
        "compute": {"cpus": cpus},
        **sections,
    }
    found = memory_faults(validate(values), {"seed_model.model": llama})
    return {fault.field: fault.remedy for fault in found}


def test_training_needs_what_its_method_keeps_of_each_parameter(monkeypatch, llama):
    everything = faults(monkeypatch, llama, 1.0)
    assert f"at least {16 * PARAMETERS / 1e9:.1f} GB" in everything["experts.training.method"]
    assert "use ffn or lora" in everything["experts.training.method"]
    ffns = faults(monkeypatch, llama, 1.0, method="ffn")["experts.training.method"]
    assert f"at least {(16 * FFNS + 2 * (PARAMETERS - FFNS)) / 1e9:.1f} GB" in ffns
    lora = faults(monkeypatch, llama, 1.0, method="lora")["experts.training.method"]
    assert f"at least {2 * PARAMETERS / 1e9:.1f} GB" in lora
    assert "there are 1.0; use a larger machine" in lora


def test_statistics_hold_one_model_and_evaluation_the_mixture(monkeypatch, llama):
    found = faults(monkeypatch, llama, 20.0, method="lora")
    assert f"at least {4 * PARAMETERS / 1e9:.1f} GB" in found["statistics.precision"]
    mixture = PARAMETERS + 4 * FFNS
    assert f"at least {4 * mixture / 1e9:.1f} GB" in found["evaluation.precision"]
    in_bf16 = {"statistics": {"precision": "bf16"}, "evaluation": {"precision": "bf16"}}
    assert faults(monkeypatch, llama, 62.0, method="lora", **in_bf16) == {}
    assert faults(monkeypatch, llama, 61.0, method="lora", **in_bf16).keys() == {
        "evaluation.precision"
    }


def test_pieces_that_run_at_once_share_the_memory(monkeypatch, llama):
    assert faults(monkeypatch, llama, 129.0) == {}
    found = faults(monkeypatch, llama, 129.0, cpus=8)
    assert "5 at once" in found["experts.training.method"]
    assert "compute.experts.cpus = 8" in found["experts.training.method"]
    assert "2 at once" in found["evaluation.precision"]
    apart = {"experts": {"cpus": 8}, "evaluation": {"cpus": 8}, "statistics": {"cpus": 8}}
    assert faults(monkeypatch, llama, 129.0, compute={"cpus": 8, **apart}) == {}


def test_a_cluster_s_machines_are_not_asked(monkeypatch, llama):
    monkeypatch.setattr(fits, "machine_memory", lambda device: 1)
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    recipe = validate({"name": "n", "domains": {d: {"train": {"files": ["t"]}} for d in DOMAINS}})
    assert list(memory_faults(recipe, {"seed_model.model": llama})) == []


def test_a_container_s_limit_is_the_machine_s_memory(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "LIMITS", (tmp_path / "nowhere", limit))
    limit.write_text("max\n")
    whole = memory.machine_memory("cpu")
    limit.write_text("12345678\n")
    assert memory.machine_memory("cpu") == 12345678 < whole
