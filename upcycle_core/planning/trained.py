"""Peak memory of training what is no dense model: a Mixture-of-Experts, and a SIMoE.

Shapes: L layers, H hidden size, D experts, k experts a token, M experts of a SIMoE.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from upcycle_core.planning import estimate, rehearsal
from upcycle_core.planning.shape import Shape
from upcycle_core.precision import DTYPES, arithmetic
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.training.config import Group, TrainingConfig
from upcycle_core.training.vocabulary import NUMBERS
from upcycle_core.training.workers import divided_dimension

FP32, BF16, MOMENTS, MASK = 4, 2, 2, 4
STATES = FP32 * (1 + MOMENTS)
"""Bytes that AdamW and a gradient add to a trained parameter in fp32."""


def mixture_training_bytes(
    shape: Shape,
    config: TrainingConfig,
    *,
    experts: int,
    top_k: int,
    trainable: Sequence[Group] = ("all",),
    device: str = "cpu",
    workers: int = 1,
) -> int:
    """Bytes at the peak of a step of a MoE.

    A token passes through k experts, so what is kept for the backward pass is what a dense model
    with FFNs k times as wide keeps; weights, gradients and moments are those of all D.

    Args:
        shape: Of the dense model that each expert belongs to.
        config: How it is trained.
        experts: D.
        top_k: k.
        trainable: What is trained.
        device: Where it runs.
        workers: How many divide weights, gradients and moments; of each, the bytes.
    """
    wide = shape.with_inner(min(top_k, experts) * shape.inner)
    whole = TrainingConfig(**{name: getattr(config, name) for name in asdict(TrainingConfig())})
    beside = shape.mixture(experts) - wide.whole
    frozen = shape.mixture(experts) - trained_of(shape, experts, trainable)
    step = estimate.training_bytes(wide, whole, device=device, workers=workers)
    states = FP32 + MOMENTS * (FP32 if config.optimizer_state == "fp32" else FP32 // 2)
    held = (FP32 + states) * beside - states * frozen
    if workers == 1:
        return step + held
    each = FP32 + (states if {"all", "experts"} & set(trainable) else 0)
    more = _largest_share(shape, experts, workers) - 1 / workers
    held = held // workers + int(more * each * experts * shape.ffns)
    # A layer is gathered with its gradient, those of its experts that a token passes by too.
    return step + held + 2 * FP32 * beside // shape.layers


def _largest_share(shape: Shape, experts: int, workers: int) -> float:
    """Of all experts, what the worker with the most holds."""
    share = 0.0
    for columns, sizes in {
        2: (experts, 2 * shape.inner, shape.hidden),  # gate and up
        1: (experts, shape.hidden, shape.inner),
    }.items():
        size = sizes[divided_dimension(sizes, workers)]
        share += columns / 3 * -(-size // workers) / size
    return share


def trained_of(shape: Shape, experts: int, trainable: Sequence[Group]) -> int:
    """Parameters of a MoE of D experts that have gradients and moments."""
    routers = shape.layers * experts * shape.hidden
    parts = {
        "router": routers,
        "experts": experts * shape.ffns,
        "expert_gates": 0 if "experts" in trainable else 2 * experts * shape.ffns // 3,
        "shared_base": shape.ffns,
        "backbone": shape.whole - shape.ffns,
        "all": shape.mixture(experts),
    }
    return min(parts["all"], sum(parts[group] for group in dict.fromkeys(trainable)))


def gated_parameters(shape: Shape, config: SimoeUpcyclingConfig) -> int:
    """Parameters that a SIMoE has a delta for."""
    own = shape.ffns if config.layers == "ffn" else shape.linear
    heads = 0 if shape.is_tied or not config.lm_head else shape.ends // 2
    return own + heads


def gate_parameters(shape: Shape, config: SimoeUpcyclingConfig) -> int:
    """Gates of a SIMoE: one an expert and input neuron, or one an expert and parameter."""
    if config.masks == "parameters":
        return config.experts * gated_parameters(shape, config)
    ffn = shape.layers * (2 * shape.hidden + shape.inner)
    rest = shape.layers * (5 * shape.hidden + shape.heads_width) + shape.hidden
    return config.experts * (ffn + (rest if config.layers == "all" else 0))


def simoe_training_bytes(
    shape: Shape,
    config: TrainingConfig,
    simoe: SimoeUpcyclingConfig,
    *,
    device: str = "cpu",
    workers: int = 1,
) -> int:
    """Bytes at the peak of a SIMoE's training: a step, or what is written at its end.

    At the end the pruned deltas are made beside the trained ones, whose moments are still there;
    what was pre-trained is there in fp32, beside bf16 where it was held so.

    Args:
        shape: Of the dense model, which stays as it is.
        config: How the deltas are trained.
        simoe: The experts.
        device: Where it runs.
        workers: How many divide all but gates and router; of the one that writes, the bytes. It has
            all but the deltas whole then, not on its GPU.
    """
    gated = gated_parameters(shape, simoe)
    trained = gated + gate_parameters(shape, simoe)
    base = BF16 if arithmetic(config.precision, device) == "bf16" else FP32
    at_the_end = FP32 * (shape.whole + trained) + FP32 * MOMENTS * trained + FP32 * gated
    if base == BF16:
        at_the_end += BF16 * gated
    if workers > 1:  # all gradients are there at once, as in what is held
        config = replace(config, gradient_accumulation=max(2, config.gradient_accumulation))
    bound = estimate.training_bytes(shape, config, device=device)
    if bound > estimate.SMALL:
        bound = _rehearsed(shape, config, simoe, device)
    else:
        bound += (FP32 + STATES) * trained
    if workers == 1:
        return max(bound, at_the_end)
    kept = base * gated + FP32 * (shape.whole - gated) + FP32 * (1 + MOMENTS) * gated
    held = kept + FP32 * gated
    tokens = config.batch_size * config.sequence_length
    states = min(NUMBERS, workers * tokens * shape.hidden)  # of all, where both ends are divided
    layer = (base + 2 * FP32) * (gated // shape.layers)  # gathered, with its gradient
    step = max(bound - held, 0) + held // workers + layer + 2 * FP32 * states
    mapped = shape.whole if shape.itemsize == FP32 else 0  # as its file has it
    written = kept // workers + FP32 * (shape.whole - mapped + gated)
    return step if device == "cuda" else max(step, written)


def _rehearsed(
    shape: Shape, config: TrainingConfig, simoe: SimoeUpcyclingConfig, device: str
) -> int:
    described, bf16 = json.dumps(dict(shape.config)), arithmetic(config.precision, device) == "bf16"

    def rehearse(rows: int) -> int:
        counted = TrainingConfig(
            batch_size=rows,
            sequence_length=config.sequence_length,
            gradient_accumulation=min(2, config.gradient_accumulation),
            gradient_checkpointing=config.gradient_checkpointing,
        )
        return _step_bytes(described, shape.layers, counted, simoe, bf16)

    return rehearsal.of_rows(rehearse, config, shape.vocabulary)


@lru_cache
def _step_bytes(
    described: str, depth: int, config: TrainingConfig, simoe: SimoeUpcyclingConfig, bf16: bool
) -> int:
    """Of a SIMoE, rehearsed once for all who ask."""
    from upcycle_core.simoe.model import SimoeForCausalLM
    from upcycle_core.simoe.upcycle import narrow_base, simoe_config

    def rehearse(layers: int) -> int:
        with FakeTensorMode(), rehearsal.Held() as held:
            dense = rehearsal.model_config(json.loads(described), layers)
            # Whatever routes, the coefficients are given: tasks' names are the text's to say.
            network = SimoeForCausalLM(simoe_config(dense, replace(simoe, routing="instance")))
            narrow_base(network, DTYPES["bf16" if bf16 else "fp32"])
            network.train()
            if config.gradient_checkpointing:
                network.activation_checkpointing_enable({"use_reentrant": False})
            sizes = (config.batch_size, simoe.experts)
            alpha = torch.full(sizes, 1 / simoe.experts, requires_grad=True)
            rehearsal.step(network, config, held, bf16=bf16, coefficients=alpha)
            return held.peak

    return rehearsal.extrapolated(rehearse, depth)
