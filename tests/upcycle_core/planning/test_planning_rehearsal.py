"""Rehearsed memory against what torch's profiler counts of the real thing, a step or a pass."""

from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from tests.pico import CONFIGS, pico_config
from upcycle_core.planning import rehearsal
from upcycle_core.planning.rehearsal import forward_bytes, of_rows, training_bytes
from upcycle_core.planning.shape import Shape
from upcycle_core.training.config import ExpertTrainingConfig, LoraSettings, TrainingConfig
from upcycle_core.training.expert import add_adapter, freeze_others
from upcycle_core.training.head import SLICE, sliced_head

LAYERS, BATCH, LENGTH = 5, 4, 64
SIZES = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 700, "head_dim": 16}


def shape_of(family: str = "llama") -> tuple[Shape, object]:
    config = pico_config(family, num_hidden_layers=LAYERS, **SIZES)
    return Shape.of_config(config.to_dict(), 4), config


def peak(call) -> int:
    """The most that torch's allocator held at once beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    held = most = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def parameters(model, *, trained: bool) -> int:
    return sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad or not trained)


def measured(config, training: ExpertTrainingConfig) -> int:
    """Weights and moments as counted, activations and gradients as torch allocates them."""
    precision = torch.bfloat16 if training.precision == "bf16" else torch.float32
    start = precision if training.method == "lora" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=start)
    if training.method == "lora":
        add_adapter(model, training.lora, seed=0)
    elif training.method != "full":
        freeze_others(model, training.method, precision)
    model.train()
    cast = torch.autocast("cpu", precision) if training.precision == "bf16" else nullcontext()
    ids = torch.randint(0, 700, (BATCH, LENGTH))
    held = []  # the optimizer's step frees gradients after the peak

    def step():
        with cast, sliced_head(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        held.append(loss)

    fixed = parameters(model, trained=False) + 2 * parameters(model, trained=True)
    return fixed + peak(step)


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        *(("full", "fp32"), ("layers", "bf16"), ("ffn", "fp32"), ("lora", "bf16")),
        *(
            pytest.param(*both, marks=pytest.mark.faults)
            for both in (("full", "bf16"), ("layers", "fp32"), ("ffn", "bf16"), ("lora", "fp32"))
        ),
    ],
)
def test_a_training_step_needs_what_was_rehearsed(method, precision):
    shape, config = shape_of()
    training = ExpertTrainingConfig(
        method=method,
        steps=2,
        warmup_steps=1,
        batch_size=BATCH,
        sequence_length=LENGTH,
        precision=precision,
        lora=LoraSettings(rank=4) if method == "lora" else None,
    )
    assert training_bytes(shape, training) == pytest.approx(measured(config, training), rel=0.1)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_forward_pass_needs_what_was_rehearsed(family):
    shape, config = shape_of(family)
    body = AutoModelForCausalLM.from_config(config).base_model.eval()
    ids = torch.randint(0, 700, (BATCH, LENGTH))
    with torch.no_grad():
        real = peak(lambda: body(input_ids=ids, use_cache=False))
    expected = parameters(body, trained=False) + real
    # On fake tensors transformers cannot see that no mask is needed, and repeats keys and values.
    assert 1 <= forward_bytes(shape, (BATCH, LENGTH), precision="fp32") / expected < 1.15


def test_a_batch_however_large_is_rehearsed_by_two_that_are_small():
    shape, _ = shape_of()
    common = {"steps": 2, "warmup_steps": 1, "precision": "fp32", "sequence_length": LENGTH}
    asked, rows = [], 2 * SLICE // shape.vocabulary // LENGTH

    def rehearse(count):
        asked.append(count)
        return training_bytes(shape, ExpertTrainingConfig(**common, batch_size=count))

    large = ExpertTrainingConfig(**common, batch_size=6 * rows)
    found = of_rows(rehearse, large, shape.vocabulary)
    assert asked == [rows, 2 * rows]
    # All of its tokens at once: the slices are many, and no mistake is hidden by a limit.
    whole = of_rows(rehearse, large, 1)
    assert asked[2:] == [6 * rows]
    assert found == pytest.approx(whole, rel=1e-3)
    huge = ExpertTrainingConfig(**common, batch_size=10**9)
    assert training_bytes(shape, huge) > 10**9 * LENGTH * shape.hidden


@pytest.mark.parametrize("name", ["q_proj", "self_attn.q_proj"])
def test_an_adapter_is_rehearsed_beside_the_layers_that_it_names(name):
    shape, _ = shape_of()
    common = {"steps": 2, "warmup_steps": 1, "batch_size": BATCH, "sequence_length": LENGTH}
    settings = {**common, "method": "lora", "precision": "fp32"}
    small, large = (
        training_bytes(
            shape, ExpertTrainingConfig(**settings, lora=LoraSettings(rank=rank, modules=(name,)))
        )
        for rank in (1, 1001)
    )
    one = 1000 * (shape.hidden + shape.heads_width)  # A and B of a layer, each with four numbers
    assert large - small > LAYERS * one * 12


def test_gradients_that_are_added_up_lie_beside_the_activations():
    shape, _ = shape_of()
    common = {"steps": 2, "warmup_steps": 1, "batch_size": BATCH, "sequence_length": LENGTH}
    once = training_bytes(shape, ExpertTrainingConfig(**common, precision="fp32"))
    twice = ExpertTrainingConfig(**common, gradient_accumulation=2, precision="fp32")
    assert once < training_bytes(shape, twice) <= once + 4 * shape.whole


def test_checkpointed_activations_are_not_held():
    shape, _ = shape_of()
    common = {"steps": 2, "warmup_steps": 1, "batch_size": BATCH, "sequence_length": LENGTH}
    kept = training_bytes(shape, ExpertTrainingConfig(**common, precision="fp32"))
    given_up = ExpertTrainingConfig(**common, gradient_checkpointing=True, precision="fp32")
    assert training_bytes(shape, given_up) < 0.8 * kept


def test_narrow_moments_and_workers_that_divide_need_less():
    shape, _ = shape_of()
    common = {"steps": 2, "warmup_steps": 1, "batch_size": BATCH, "sequence_length": LENGTH}
    wide = ExpertTrainingConfig(**common, precision="fp32")
    narrow = ExpertTrainingConfig(**common, precision="fp32", optimizer_state="bf16")
    whole = training_bytes(shape, wide)
    assert training_bytes(shape, narrow) == whole - 4 * shape.whole
    # Weight, gradient and two moments of 4 bytes; two layers' worth of the small model is gathered.
    divided = training_bytes(shape, wide, workers=4)
    assert whole - 16 * shape.whole < divided < whole - 0.5 * 16 * shape.whole


@pytest.mark.parametrize(
    ("settings", "rehearsals"),
    [
        ({"steps": 7, "learning_rate": 1e-3}, 0),
        ({"optimizer_state": "bf16"}, 0),
        ({"gradient_accumulation": 8}, 0),
        ({"gradient_accumulation": 1}, 2),
        ({"batch_size": BATCH + 1}, 2),
        ({"gradient_checkpointing": True}, 2),
        ({"precision": "bf16"}, 2),
        ({"method": "ffn"}, 2),
    ],
)
def test_only_what_changes_a_step_is_rehearsed_again(monkeypatch, settings, rehearsals):
    given = {"batch_size": BATCH, "sequence_length": LENGTH, "precision": "fp32"}
    given["gradient_accumulation"] = 2
    rehearsal._training_bytes.cache_clear()
    first = training_bytes(shape_of()[0], TrainingConfig(**given))
    done, step = [], rehearsal.step
    monkeypatch.setattr(rehearsal, "step", lambda *a, **k: (done.append(1), step(*a, **k)))
    again = training_bytes(shape_of()[0], ExpertTrainingConfig(**given | settings), workers=1)
    assert training_bytes(shape_of()[0], TrainingConfig(**given), workers=2) < first
    assert len(done) == rehearsals
    assert (again != first) == bool(rehearsals or "optimizer_state" in settings)
