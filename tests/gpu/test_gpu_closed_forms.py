"""Closed forms and scores on a GPU, against the CPU."""

from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.closed_forms import TOLERANCE, assert_alike, calls, made
from tests.upcycle_core.dume.test_dume_repair import write_corpus
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.symphony.test_symphony_moments import stranger, texts  # noqa: F401  (a fixture)
from upcycle_core.checkpoints.divided import gpu_rooms
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.evaluation.similarity.config import SimilarityConfig
from upcycle_core.evaluation.similarity.measure import moe_similarity
from upcycle_core.symphony.config import CalibrationConfig
from upcycle_core.symphony.moments import collect_moments

pytestmark = pytest.mark.gpu
DEVICES = ("cuda", "cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(root):
    return made(root)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_gpu_s_figures_are_the_cpu_s(tmp_path, root, models, precision):
    there, here = (
        calls(root, tmp_path / device, *models, precision, device=device) for device in DEVICES
    )
    assert_alike(there, here, precision)


def test_logits_of_a_moe(tmp_path):
    moe = join(tmp_path, top_k=2).model
    ids = torch.arange(2, 40).view(2, -1)
    with torch.inference_mode():
        there = load_causal_lm(moe, device="cuda")(ids.cuda()).logits.cpu()
        eager = AutoModelForCausalLM.from_pretrained(moe, experts_implementation="eager")
        assert torch.allclose(there, eager(ids).logits, atol=1e-4)


def test_a_moe_that_all_gpus_hold_among_them_answers_as_on_the_cpu(tmp_path):
    moe = join(tmp_path, top_k=2).model
    ids = torch.arange(2, 40).view(2, -1)
    there, here = (load_causal_lm(moe, device=device) for device in ("auto", "cpu"))
    assert {str(place) for place in there.hf_device_map.values()} <= set(gpu_rooms())
    with torch.inference_mode():
        assert torch.allclose(there(ids.cuda()).logits.cpu(), here(ids).logits, atol=1e-4)
        ends = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
        given = [model.generate(ids.to(model.device), **ends).cpu() for model in (there, here)]
    assert torch.equal(*given)


@pytest.mark.parametrize("features", ["fp32", "bf16"])
def test_sums_of_two_models(tmp_path, texts, features):  # noqa: F811  (the fixture)
    pair = [stranger(tmp_path / str(seed), "llama", seed) for seed in (0, 1)]
    size = {"tokens": 70, "sequence_length": 24, "batch_size": 4, "layers": 1}
    config = CalibrationConfig(features=features, precision="fp32", **size)
    found = {}
    for device in DEVICES:
        file = tmp_path / f"{device}.safetensors"
        collect_moments(*pair, texts, file, config=config, layers=range(2), device=device)
        found[device] = load_file(file)
    there, here = found.values()
    assert there.keys() == here.keys()
    for name, sums in there.items():
        size = here[name].double().abs().max()
        off = (sums.double() - here[name].double()).abs().max()
        assert off <= size * (1e-5 if features == "fp32" else 1e-2), name


def test_likeness_of_experts(tmp_path):
    joined = join(tmp_path / "joined")
    where = (joined.model, [write_corpus(tmp_path / "text")], list(joined.experts))
    config = SimilarityConfig(tokens=200, sequence_length=16, batch_size=4, precision="fp32")
    there, here = (moe_similarity(*where, config=config, device=device) for device in DEVICES)
    assert len(there) == len(here) == 2 * 2 * 3  # layers, representations, pairs
    for one, other in zip(there, here, strict=True):
        for field, value in asdict(other).items():
            assert getattr(one, field) == pytest.approx(value, abs=1e-4), field
