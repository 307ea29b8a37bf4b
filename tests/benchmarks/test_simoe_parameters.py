import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import simoe_parameters
from benchmarks.simoe_parameters import MODELS, PAPER, count, pruned_config, saved
from tests.pico import pico_config, save_pico
from upcycle_core.errors import InputError
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.prune import prune, save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

ROWS = [pytest.param(row, id=f"{row.table} {row.model}") for row in PAPER]
T5 = {
    "model_type": "t5",
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("row", ROWS)
def test_counts_by_mean_are_the_papers_to_three_percent(row):
    counts = count(MODELS[row.model], row.simoe)
    assert counts.by_mean == pytest.approx(row.printed, rel=0.03)


def test_counts_equal_the_formulas():
    h, i, layers, kv, words, m = 3072, 8192, 28, 1024, 128256, 8
    inputs = layers * (6 * h + i)  # of q, k, v, o, gate, up; of down
    linear = layers * (2 * h * h + 2 * h * kv + 3 * h * i)
    norms = (2 * layers + 1) * h
    found = count(MODELS["Llama-3.2-3B"], SimoeUpcyclingConfig(tau=0.9))
    assert (found.linear, found.norms) == (linear, norms)
    assert found.dense == linear + norms + words * h
    assert found.masks == m * (inputs + norms)
    assert found.router == h * h + h + h * m + m
    assert found.by_mean == found.dense + round(0.1 * (linear + norms + found.masks))
    used = 1 - 0.9**8
    assert found.by_independent_union == found.dense + round(used * (linear + norms))


def test_settings_decide_what_is_counted():
    dense = pico_config("qwen3").to_dict()  # its heads have norms of 8; an untied head of 96 x 32
    ffn = 2 * 3 * 32 * 48
    attention = 2 * (2 * 32 * 32 + 2 * 32 * 16)
    norms = 5 * 32 + 2 * 2 * 8

    def counts(**settings):
        return count(dense, SimoeUpcyclingConfig(experts=3, **settings))

    everything = counts()
    assert (everything.linear, everything.norms) == (ffn + attention, norms)
    assert counts(lm_head=True).linear == ffn + attention + 96 * 32
    only = counts(layers="ffn", router_hidden_size=5)
    assert (only.linear, only.norms, only.masks) == (ffn, 0, 3 * 2 * (2 * 32 + 48))
    assert only.router == 32 * 5 + 5 + 5 * 3 + 3
    assert counts(masks="parameters").masks == 3 * (ffn + attention + norms)
    real = counts(masks="real")
    assert real.by_mean == real.dense + real.gated + real.masks
    by_task = count(dense, SimoeUpcyclingConfig(experts=3, routing="task"), tasks=["a", "b"])
    assert by_task.router == 2 * 3
    assert {one.dense for one in (everything, only, real, by_task)} == {
        AutoModelForCausalLM.from_config(pico_config("qwen3")).num_parameters()
    }


def test_encoder_and_decoder_are_counted():
    found = count(T5, SimoeUpcyclingConfig())
    attention, ffn = 4 * 32 * 32, 3 * 32 * 48
    assert found.linear == 2 * (attention + ffn) + 3 * (2 * attention + ffn)
    assert found.norms == 32 * (2 * 2 + 1 + 3 * 3 + 1)


@pytest.mark.parametrize(
    ("tied", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_the_saved_file_is_as_large_as_counted(tmp_path, tied, dtype):
    """Pruned unevenly: some layers whole, some without any expert."""
    save_pico(tmp_path / "dense", "qwen2", tie_word_embeddings=tied)
    model = upcycle_in_memory(tmp_path / "dense", SimoeUpcyclingConfig(experts=3), seed=0)
    with torch.no_grad():
        for place, gate in enumerate(gated_modules(model).values()):
            used = place * gate.log_phi.shape[-1] // 16
            gate.log_phi[..., used:] = -2.0
    save_pruned(prune(model.to(dtype)), tmp_path / "dense", tmp_path / "pruned")
    (file,) = (tmp_path / "pruned").glob("*.safetensors")
    config = AutoConfig.from_pretrained(tmp_path / "pruned")
    assert 0 in config.kept.values()
    counts = saved(config)
    assert counts.bytes == pytest.approx(file.stat().st_size, rel=0.005)  # names' order
    kinds = dict.fromkeys(("deltas", "indices", "masks", "router", "dense"), 0)
    endings = {"delta": "deltas", "index": "indices", "mask": "masks"}
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (it is no dict)
            kind = endings.get(name.rpartition(".")[2], "dense")
            kind = "router" if name.startswith("router.") else kind
            kinds[kind] += tensors.get_tensor(name).numel()
    assert {kind: getattr(counts, kind) for kind in kinds} == kinds


def test_a_file_is_counted_before_there_is_one():
    dense = pico_config().to_dict()
    simoe = SimoeUpcyclingConfig(experts=3)
    config = pruned_config(dense, simoe, 0.25)
    whole = count(dense, simoe)
    counts = saved(config)
    assert (counts.dense, counts.router) == (whole.dense, whole.router)
    assert counts.deltas == whole.gated // 4  # 32 and 48 inputs divide by four
    assert counts.masks == whole.masks // 4 == 3 * counts.indices
    with pytest.raises(InputError, match=r"config.kept = None: .*not pruned"):
        saved(type(config)(dense=config.dense))


def test_the_command_compares_with_the_paper(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["simoe_parameters"])
    small = [row for row in PAPER if row.model == "Llama-3.2-1B" and row.printed < 2e9]
    monkeypatch.setattr(simoe_parameters, "PAPER", small)
    assert simoe_parameters.main() == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["ratio"] == {"Llama-3.2-1B": pytest.approx(1.0206, abs=1e-4)}
    monkeypatch.setattr(simoe_parameters, "LIMIT", 0.02)
    assert simoe_parameters.main() == 1


def test_the_command_counts_any_configuration(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(pico_config().to_dict()))
    shape = "model_type=llama,hidden_size=32,intermediate_size=48,num_hidden_layers=2,vocab_size=96"
    shape += ",num_attention_heads=4,num_key_value_heads=2,head_dim=8,tie_word_embeddings=false"
    arguments = ["simoe_parameters", str(tmp_path), str(tmp_path / "config.json"), shape]
    monkeypatch.setattr("sys.argv", [*arguments, "--tau", "0.5", "--experts", "4"])
    assert simoe_parameters.main() == 0
    models = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]["models"]
    assert len({one["by_mean"] for one in models}) == 1
    assert models[0]["by_mean"] == models[0]["dense"] + (
        sum(models[0][part] for part in ("linear", "norms", "masks")) // 2
    )
    monkeypatch.setattr("sys.argv", ["simoe_parameters", "--tau", "0.5"])
    with pytest.raises(SystemExit):  # the paper's figures have settings of their own
        simoe_parameters.main()


def test_what_cannot_be_counted_is_an_error():
    dense = pico_config().to_dict()
    with pytest.raises(InputError, match=r"experts = 1"):
        count(dense, SimoeUpcyclingConfig(experts=1))
    with pytest.raises(InputError, match=r"simoe.tau = 75"):
        count(dense, SimoeUpcyclingConfig(tau=75))
    with pytest.raises(InputError, match=r"model_type"):
        count({"hidden_size": 32}, SimoeUpcyclingConfig())
    with pytest.raises(InputError, match=r"nothing"):
        count({**dense, "model_type": "nothing"}, SimoeUpcyclingConfig())
