"""Cosines of experts and base against a slow loop over loaded models."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from upcycle_core.checkpoints import reader
from upcycle_core.errors import InputError
from upcycle_core.evaluation.compression import cosine
from upcycle_core.evaluation.compression.cosine import cosine_similarities
from upcycle_core.evaluation.compression.report import cosine_numbers
from upcycle_core.evaluation.report.files import to_csv


def dense_ffns(directory) -> list[list[list[float]]]:
    """[layer][gate, up, down] a flat list of weights, as the dense model has them."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    return [
        [
            part.weight.detach().double().flatten().tolist()
            for part in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj)
        ]
        for block in model.model.layers
    ]


def slow_cosine(a: list[float], b: list[float]) -> float:
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def slow_mean(vectors: list[list[float]]) -> list[float]:
    return [math.fsum(values) / len(values) for values in zip(*vectors, strict=True)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("known", [True, False], ids=["base", "mean"])
def test_every_cosine_equals_a_slow_loop(tmp_path, monkeypatch, family, known):
    monkeypatch.setattr(cosine, "CHUNK", 1000)  # several pieces, the last one shorter
    joined = join(tmp_path, family)
    base = save_pico(tmp_path / "seed", family, seed=7, intermediate_size=64) if known else None
    found = cosine_similarities(joined.model, base)
    experts = [dense_ffns(path) for path in joined.experts.values()]
    seed = dense_ffns(base) if base else None
    assert found["names"] == ["base" if known else "mean", "E1", "E2", "E3"]
    assert list(found["layers"]) == list(found["matrices"]) == ["0", "1"]
    for layer in (0, 1):
        parts: dict[str, list[list[float]]] = {}
        for place, matrix in enumerate(("gate", "up", "down")):
            own = [expert[layer][place] for expert in experts]
            parts[matrix] = [seed[layer][place] if seed else slow_mean(own), *own]
        whole = [[*gate, *up, *down] for gate, up, down in zip(*parts.values(), strict=True)]
        shown = {"ffn": found["layers"][str(layer)], **found["matrices"][str(layer)]}
        for what, vectors in {"ffn": whole, **parts}.items():
            for i, row in enumerate(shown[what]):
                # fp64 sums in another order
                expected = [slow_cosine(vectors[i], other) for other in vectors]
                assert row == pytest.approx(expected, abs=1e-12), (layer, what, i)
                assert row[i] == 1.0


def test_experts_that_are_the_base_have_cosine_one_and_the_csv_has_every_number(tmp_path):
    joined = join(tmp_path, seeds=(3, 3))
    found = cosine_similarities(joined.model, joined.experts["domain0"])
    ones = [[pytest.approx(1.0, abs=1e-12)] * 3] * 3
    assert found["layers"] == {"0": ones, "1": ones}
    lines = to_csv(cosine_numbers(found)).splitlines()
    assert lines[0] == "layer,weights,first,second,cosine"
    assert len(lines) == 1 + 2 * 4 * 9
    assert lines[1] == "0,ffn,base,base,1.0"
    assert lines[-1] == "1,down,E2,E2,1.0"


def test_a_layer_without_experts_is_left_out(tmp_path):
    joined = join(tmp_path, "qwen3")
    file = joined.model / reader.SINGLE_FILE
    kept = {name: t for name, t in load_file(file).items() if ".layers.0.mlp." not in name}
    save_file(kept, file)
    assert list(cosine_similarities(joined.model, None)["layers"]) == ["1"]


def test_what_cannot_be_compared_is_refused_with_all_its_faults(tmp_path):
    joined = join(tmp_path)
    narrow = save_pico(tmp_path / "narrow", intermediate_size=32)
    with pytest.raises(InputError, match=r"moe\.model_type.*choose a MoE") as refused:
        cosine_similarities(narrow, None)
    assert "mixtral" in str(refused.value)
    with pytest.raises(InputError, match="base") as refused:
        cosine_similarities(joined.model, narrow)
    for layer in (0, 1):
        for part in ("gate", "up", "down"):
            assert f"layers.{layer}.mlp.{part}_proj.weight" in str(refused.value)
    with pytest.raises(InputError, match=r"base\.model_type"):
        cosine_similarities(joined.model, joined.model)
    file = joined.model / reader.SINGLE_FILE
    weights = load_file(file)
    dead = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    weights[dead] = torch.zeros_like(weights[dead])
    save_file(weights, file)
    with pytest.raises(InputError, match=r"layer 1, down, E3.*no direction"):
        cosine_similarities(joined.model, None)
    save_file({name: t for name, t in weights.items() if name != dead}, file)
    with pytest.raises(InputError, match="has no tensor " + dead):
        cosine_similarities(joined.model, None)
