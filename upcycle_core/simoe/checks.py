"""Faults of SIMoE's settings beside those of its training, found without importing torch."""

from collections.abc import Iterator
from statistics import NormalDist

from upcycle_core.errors import Fault
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.training.config import TrainingConfig

_DISTANCE = 1.3458 + 1.5986
"""From the mean of the initial log phi to where a gate is zero."""
_FASTEST = 3**0.5
"""Adam's learning rates a step, at most, for a gradient that grows steadily."""


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
    ramp = min(training.warmup_steps, training.steps)
    full = training.steps - ramp
    peaks = ramp / 2 + (full if training.schedule == "constant" else full / 2)
    distance = _DISTANCE + simoe.initial_spread * NormalDist().inv_cdf(simoe.tau)
    reach = _FASTEST * simoe.mask_learning_rate * peaks
    if reach < distance:
        remedy = (
            f"moves log phi by {reach:.2f} at most in {training.steps} steps ({ramp} of warm-up, "
            f"schedule {training.schedule}), tau = {simoe.tau:g} needs {distance:.2f}: give e.g. "
            f"{1.5 * distance / peaks:.2g}, or more steps"
        )
        yield Fault(f"{field}.mask_learning_rate", simoe.mask_learning_rate, remedy)
