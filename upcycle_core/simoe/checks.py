"""Faults of SIMoE's settings beside those of its training, found without importing torch."""

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

from upcycle_core.errors import Fault
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.training.config import TrainingConfig

_DISTANCE = 1.3458 + 1.5986
"""From the mean of the initial log phi to where a gate is zero."""
_TEMPERATURE = 2 / 3
_SLACK = 1.1
"""A gate's slope rises on its way, and with it the gradient, a little faster than lambda."""
_LEEWAY = 1.5
"""The text's own gradients, which nobody knows beforehand, may help gates on their way."""
_EPSILON = 1e-8
"""Adam's, as torch and transformers have it: gradients below it move a gate by less than a step."""


def fit_faults(
    simoe: SimoeUpcyclingConfig, training: TrainingConfig, field: str = "simoe"
) -> Iterator[Fault]:
    """What does not fit its training; arguments as ``reach_faults``."""
    yield from reach_faults(simoe, training, field)
    yield from balance_faults(simoe, training, field)


def reach_faults(
    simoe: SimoeUpcyclingConfig, training: TrainingConfig, field: str = "simoe"
) -> Iterator[Fault]:
    """A learning rate of the masks with which no gate gets to zero within the steps.

    Args:
        simoe: The upcycling.
        training: Its steps and schedule.
        field: Where ``simoe`` was given.
    """
    if not simoe.is_constrained or not 0 < simoe.tau < 1:
        return
    distance = _distance(simoe)
    reach = _SLACK * simoe.mask_learning_rate * _adam_steps(training, is_ramped=bool(simoe.closing))
    if reach < distance:
        enough = f"{1.5 * distance * simoe.mask_learning_rate / reach:.2g}, or " if reach else ""
        remedy = (
            f"moves log phi by {reach:.2f} at most in {training.steps} steps "
            f"({training.warmup_steps} of warm-up, schedule {training.schedule}), tau = "
            f"{simoe.tau:g} needs {distance:.2f}: give {enough}more steps"
        )
        yield Fault(f"{field}.mask_learning_rate", simoe.mask_learning_rate, remedy)


def pull_faults(
    simoe: SimoeUpcyclingConfig,
    training: TrainingConfig,
    gates: Sequence[tuple[int, int]],
    field: str = "simoe",
) -> Iterator[Fault]:
    """A lambda whose pull is too small, at a model's size, to get gates to zero that it could.

    Of the expected sparsity a gate has the share w / (M x all parameters), w parameters a gate:
    that times lambda times P (1 - P) is its gradient, and beta pulls with 2 z / layers times its
    slope where masks are to have length one. Adam moves a gate by a step only where both are above
    epsilon. Looked at is the gate that decides: the heaviest have the largest gradients and close
    first, and with it tau of the parameters are closed.

    Args:
        simoe, training, field: As for ``reach_faults``.
        gates: Of each layer: parameters that a gate decides about, and gates of one expert.
    """
    if not simoe.is_constrained or not 0 < simoe.tau < 1 or not gates:
        return
    share = _deciding(gates, simoe.tau) / (simoe.experts * sum(w * count for w, count in gates))
    length = simoe.beta / len(gates) if simoe.orthogonality == "full" else 0.0
    distance = _distance(simoe)
    moved, free = (
        _LEEWAY * _pulled(simoe, training, share, length=length, epsilon=epsilon)
        for epsilon in (_EPSILON, 0.0)
    )
    if moved < distance <= free:
        remedy = (
            f"at this model's size pulls the gates that decide by about {moved / _LEEWAY:.2f} in "
            f"{training.steps} steps, tau = {simoe.tau:g} needs {distance:.2f}: lambda's gradients "
            "are below Adam's epsilon too long; give e.g. ten times as much, or more steps"
        )
        yield Fault(f"{field}.multiplier_learning_rate", simoe.multiplier_learning_rate, remedy)


def division_faults(
    simoe: SimoeUpcyclingConfig, *, is_encoder_decoder: bool, field: str = "simoe"
) -> Iterator[Fault]:
    """What workers cannot divide; gates they do not, and of these there may be too many.

    Args:
        simoe: The upcycling.
        is_encoder_decoder: Whether the dense model is, as a T5.
        field: Where ``simoe`` was given.
    """
    if simoe.masks == "parameters":
        remedy = "is a gate a parameter, and each worker has all gates: use neurons or real, or "
        remedy += "sharding: none"
        yield Fault(f"{field}.masks", simoe.masks, remedy)
    if is_encoder_decoder:
        remedy = "an encoder-decoder has two lists of layers; use sharding: none"
        yield Fault("sharding", "full", remedy)


def balance_faults(
    simoe: SimoeUpcyclingConfig, training: TrainingConfig, field: str = "simoe"
) -> Iterator[Fault]:
    """A balance that would pull at each prompt: a forward pass of one prompt has no other mean.

    Arguments as ``reach_faults``.
    """
    if simoe.balance and simoe.routing == "instance" and training.batch_size == 1:
        remedy = "is of a batch's mean coefficients, and with batches of one prompt each prompt "
        remedy += "would use all experts alike; use a batch_size of 2 or more, better 8, or 0"
        yield Fault(f"{field}.balance", simoe.balance, remedy)


def _distance(simoe: SimoeUpcyclingConfig) -> float:
    """How far log phi goes from where it starts until tau of the places are closed.

    Of ``union`` a place is closed when the last of its gates is.
    """
    share = simoe.tau ** (1 / simoe.experts) if simoe.sparsity == "union" else simoe.tau
    return _DISTANCE + simoe.initial_spread * NormalDist().inv_cdf(share)


def _deciding(gates: Sequence[tuple[int, int]], tau: float) -> int:
    """Parameters of the gate with which ``tau`` of all are closed, from the heaviest gates on."""
    left = tau * sum(weights * count for weights, count in gates)
    for weights, count in sorted(gates, reverse=True):
        left -= weights * count
        if left <= 0:
            break
    return weights


def _pulled(
    simoe: SimoeUpcyclingConfig,
    training: TrainingConfig,
    share: float,
    *,
    length: float,
    epsilon: float,
) -> float:
    """How far a lambda that nothing holds takes log phi, on a gate's slopes as it goes.

    Args:
        simoe, training: As for ``reach_faults``.
        share: Of the gate, of the expected sparsity.
        length: beta of one layer, where it pulls at a mask's length; else 0.
        epsilon: Adam's.
    """
    first, second = training.adam_beta1, training.adam_beta2
    distance = _distance(simoe)
    mean = square = multiplier = moved = 0.0
    for step in range(1, training.steps + 1):
        left = max(distance - moved, 0.0)
        open_share = 1 / (1 + math.exp(-left))
        gradient = multiplier * share * open_share * (1 - open_share)
        # Of the stretched sigmoid, from -0.1 to 1.1: it is zero at a log phi of -1.5986.
        sigmoid = 1 / (1 + math.exp((1.5986 - left) / _TEMPERATURE))
        gate, slope = 1.2 * sigmoid - 0.1, 1.2 / _TEMPERATURE * sigmoid * (1 - sigmoid)
        gradient += 2 * length * max(0.0, gate) * slope
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient * gradient
        root = math.sqrt(square / (1 - second**step))
        taken = mean / (1 - first**step) / (root + epsilon) if root else 0.0
        moved += _share_of_peak(training, step - 1) * simoe.mask_learning_rate * taken
        ramp = 1.0 if simoe.closing is None else min(1.0, step / (simoe.closing * training.steps))
        multiplier += simoe.multiplier_learning_rate * simoe.tau * ramp
    return moved


def _adam_steps(training: TrainingConfig, *, is_ramped: bool) -> float:
    """How far Adam goes in peak learning rates, for the gradient of a lambda that grows.

    Lambda, and with it the gradient, grows with the step while all gates are open, with its square
    where ``is_ramped``: tau rises as well. The shorter Adam's memory of squares is beside the
    training, the nearer a step is to one learning rate.
    """
    first, second = training.adam_beta1, training.adam_beta2
    mean, square, moved = 0.0, 0.0, 0.0
    for step in range(1, training.steps + 1):
        gradient = float(step * step if is_ramped else step)
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient * gradient
        unbiased = mean / (1 - first**step), math.sqrt(square / (1 - second**step))
        moved += _share_of_peak(training, step - 1) * unbiased[0] / unbiased[1]
    return moved


def _share_of_peak(training: TrainingConfig, step: int) -> float:
    """The learning rate of a step, from 0, in peaks."""
    if step < training.warmup_steps:
        return step / training.warmup_steps
    left = (training.steps - step) / max(1, training.steps - training.warmup_steps)
    if training.schedule == "constant":
        return 1.0
    return left if training.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
