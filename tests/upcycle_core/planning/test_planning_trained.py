"""Planned memory of what is no dense model, against what torch counts of the real thing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_planning_rehearsal import SIZES, parameters, peak, shape_of
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.pico import pico_config, save_pico_tokenizer
from upcycle_core.ders import compress as compressing
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.ders.decompose import Decomposed
from upcycle_core.planning import estimate, rehearsal
from upcycle_core.planning.compression import compressed_bytes, compressing_bytes
from upcycle_core.planning.shape import Shape
from upcycle_core.planning.trained import (
    gate_parameters,
    gated_parameters,
    mixture_training_bytes,
    simoe_training_bytes,
    trained_of,
)
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import SimoeForCausalLM, gated_modules
from upcycle_core.simoe.upcycle import simoe_config
from upcycle_core.training.config import TrainingConfig
from upcycle_core.training.groups import select_trainable
from upcycle_core.training.head import sliced_head

ROOT = Path(__file__).resolve().parents[3]
BATCH, LENGTH, EXPERTS = 4, 64, 4
CONFIG = TrainingConfig(
    steps=2, warmup_steps=1, batch_size=BATCH, sequence_length=LENGTH, precision="fp32"
)


def mixtral(config, top_k):
    values = {**config.to_dict(), "num_local_experts": EXPERTS, "num_experts_per_tok": top_k}
    values = {k: v for k, v in values.items() if k not in ("model_type", "architectures")}
    return AutoModelForCausalLM.from_config(
        MixtralConfig(**values), experts_implementation="grouped_mm"
    )


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A MoE of matrices that are much larger than all else."""
    config = pico_config(**{**SIZES, "hidden_size": 256, "intermediate_size": 768})
    folder = tmp_path_factory.mktemp("moe")
    mixtral(config, 1).save_pretrained(folder)
    save_pico_tokenizer(folder, config.vocab_size)
    return Shape.of_config(config.to_dict(), 4), folder


def stepped(model, **given):
    """Bytes at the peak of a step: weights and moments as counted, the rest as torch allocates."""
    model.train()
    ids = torch.randint(0, 700, (BATCH, LENGTH))
    held = []

    def step():
        with sliced_head(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False, **given).loss
        loss.backward()
        held.append(loss)

    return parameters(model, trained=False) + 2 * parameters(model, trained=True) + peak(step)


@pytest.mark.parametrize(
    ("groups", "top_k"), [(("all",), 2), (("router",), 2), (("experts", "backbone"), 1)]
)
def test_a_step_of_a_mixture_needs_what_was_planned(monkeypatch, groups, top_k):
    monkeypatch.setattr(estimate, "SMALL", 0)
    shape, config = shape_of()
    model = mixtral(config, top_k)
    select_trainable(model, groups)
    common = {"experts": EXPERTS, "top_k": top_k, "trainable": groups}
    planned = mixture_training_bytes(shape, CONFIG, **common)
    assert planned == pytest.approx(stepped(model), rel=0.2)


@pytest.mark.parametrize(("workers", "share"), [(2, 1 / 2), (3, 2 / EXPERTS), (8, 1 / 8)])
def test_a_worker_holds_a_share_of_each_expert_or_whole_ones(workers, share):
    """Three workers divide neither four experts nor their width: there is room for two on each."""
    shape = Shape.of_config(pico_config(**{**SIZES, "hidden_size": 256}).to_dict(), 4)
    common = {"experts": EXPERTS, "top_k": 2, "workers": workers}
    trained, frozen = (
        mixture_training_bytes(shape, CONFIG, trainable=groups, **common)
        for groups in (("all",), ("backbone",))
    )
    each = (trained - frozen) / (EXPERTS * shape.ffns)
    assert each == pytest.approx(12 * share, rel=0.02)  # gradient and moments


def test_a_simoe_has_the_deltas_and_gates_that_were_counted(monkeypatch):
    shape, config = shape_of()
    for settings in (SimoeUpcyclingConfig(experts=3), SimoeUpcyclingConfig(layers="ffn")):
        model = SimoeForCausalLM(simoe_config(config, settings))
        modules = gated_modules(model).values()
        deltas = sum(module.delta.numel() for module in modules)
        gates = sum(module.log_phi.numel() for module in modules)
        assert gated_parameters(shape, settings) == pytest.approx(deltas, rel=0.01)
        assert gate_parameters(shape, settings) == pytest.approx(gates, rel=0.01)


@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("vocabulary", [pytest.param(700, marks=pytest.mark.faults), 4000])
def test_a_step_of_a_simoe_needs_what_was_planned(monkeypatch, vocabulary, lm_head):
    """However large the vocabulary is; a head that has experts makes whole logits."""
    monkeypatch.setattr(estimate, "SMALL", 0)
    monkeypatch.setattr("upcycle_core.training.head.SLICE", 10 * vocabulary)
    settings = SimoeUpcyclingConfig(experts=3, lm_head=lm_head)
    config = pico_config(num_hidden_layers=2, **{**SIZES, "vocab_size": vocabulary})
    model = SimoeForCausalLM(simoe_config(config, settings))
    model.freeze()
    alpha = torch.full((BATCH, 3), 1 / 3, requires_grad=True)
    planned = simoe_training_bytes(Shape.of_config(config.to_dict(), 4), CONFIG, settings)
    assert planned == pytest.approx(stepped(model, coefficients=alpha), rel=0.2)


def test_routing_by_task_is_planned_before_the_tasks_are_known(monkeypatch):
    monkeypatch.setattr(estimate, "SMALL", 0)
    shape, _ = shape_of()
    by_task, by_prompt = (
        simoe_training_bytes(shape, CONFIG, SimoeUpcyclingConfig(experts=3, routing=routing))
        for routing in ("task", "instance")
    )
    assert by_task == by_prompt > 0


@pytest.mark.parametrize("checkpoints", [pytest.param(True, marks=pytest.mark.faults), False])
def test_workers_divide_all_but_what_a_batch_keeps(checkpoints):
    """Of Llama-3's 8 B on GPUs: bf16 layers, fp32 deltas with gradient and moments, fp32 ends."""
    training = replace(CONFIG, precision="bf16", gradient_checkpointing=checkpoints)
    shape = Shape.of(ROOT / "recipes" / "large" / "llama-3-8b")
    planned = {
        count: simoe_training_bytes(
            shape, training, SimoeUpcyclingConfig(), device="cuda", workers=count
        )
        for count in (1, 2, 4, 8)
    }
    layers, ends = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336), 2 * 128256 * 4096
    divided = (2 + 16) * layers + 4 * ends
    gathered = (2 + 8) * layers / 32
    assert planned[1] > divided
    left = [planned[count] - divided / count - gathered for count in (2, 4, 8)]
    assert all(0 < kept < 8e9 for kept in left)
    assert left == pytest.approx(left[:1] * 3, abs=2e8)  # a batch's own


@pytest.mark.parametrize(
    "codec",
    [
        CodecConfig(codec="sparse", drop_rate=0.9),
        CodecConfig(codec="quantised", bits=4),
        CodecConfig(codec="low_rank", rank=4),
    ],
    ids=lambda codec: codec.codec,
)
def test_storing_deltas_needs_what_was_planned(moe, tmp_path, codec):
    shape, folder = moe
    # The profiler does not see that mapped weights are given back: one matrix of all experts tells.
    work = compressing._Work(Decomposed.open(folder, None), codec, {}, 0)
    first = next(iter(work.codec(0, "up_proj").layout(EXPERTS, (1, 1), torch.float32)))
    used = peak(lambda: work._encoded(0, "up_proj", first))
    compress(folder, tmp_path / "out", config=codec, minimum_cosine=-1)
    planned = compressing_bytes(shape, codec, EXPERTS)
    assert planned == pytest.approx(used, rel=0.2)
    stored = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert compressed_bytes(shape, codec, EXPERTS) == pytest.approx(stored, rel=0.02)


def test_a_bound_is_never_below_the_rehearsal():
    shape, _ = shape_of()
    rehearsed = rehearsal.training_bytes(shape, CONFIG)
    assert rehearsed <= estimate.training_bytes(shape, CONFIG) <= 3 * rehearsed
    forward = rehearsal.forward_bytes(shape, (BATCH, LENGTH), precision="fp32")
    bound = estimate.forward_bytes(shape, (BATCH, LENGTH), precision="fp32")
    assert forward <= bound <= 3 * forward


@pytest.mark.parametrize("groups", [("all",), ("router",)])
def test_narrow_moments_leave_room_for_the_weights_of_all_experts(monkeypatch, groups):
    monkeypatch.setattr(estimate, "SMALL", 0)
    config = pico_config(**{**SIZES, "num_hidden_layers": 24})
    shape = Shape.of_config(config.to_dict(), 4)
    common = {"experts": EXPERTS, "top_k": 2, "trainable": groups}
    wide, narrow = (
        mixture_training_bytes(shape, replace(CONFIG, optimizer_state=kind), **common)
        for kind in ("fp32", "bf16")
    )
    trained = trained_of(shape, EXPERTS, groups)
    assert narrow > 4 * shape.mixture(EXPERTS) + 8 * trained
    assert wide - narrow <= 4 * trained  # a tensor is stepped in fp32 meanwhile
