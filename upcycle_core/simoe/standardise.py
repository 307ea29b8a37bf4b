"""What a SIMoE router's states have in common, taken from them (not in the paper).

The last token of a prompt is often the same, and with it most of its state: a router that starts
near zero then sees every prompt alike, and one expert wins them all.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from upcycle_core.errors import Fault, InputError
from upcycle_core.training.rows import collate

PROMPTS = 1024
"""Training prompts that mean and deviation are taken of."""
_AT_ONCE = 16
_LEAST = 1e-4
"""Of the states' size: a deviation below is none."""


@torch.no_grad()
def standardise_states(model: Any, rows: Dataset, *, prompts: int = PROMPTS) -> float:
    """Set the router's mean and deviation from the first rows of a training.

    Args:
        model: Upcycled, in evaluation mode; its router standardises.
        rows: As for ``training.trainer.train``: [S] ``input_ids``, ``labels``, ``attention_mask``.
        prompts: How many rows are read.

    Returns:
        The share of the states' energy that all prompts have in common, ||mean h||^2 / mean
        ||h||^2.

    Raises:
        InputError: The state is the same for every prompt: nothing could be routed by it.
    """
    states: list[Tensor] = []
    hook = model.router.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    total: Any = 0
    square: Any = 0
    count = 0
    try:
        some = Subset(rows, range(min(prompts, len(rows))))  # type: ignore[arg-type]  # it has a length
        for batch in DataLoader(some, batch_size=_AT_ONCE, collate_fn=collate):
            given = {name: value.to(model.device) for name, value in batch.items()}
            known = ("input_ids", "attention_mask", "labels")
            model.coefficients(**{name: given[name] for name in known if name in given})
            state = states.pop().double()
            if state.dim() == 3:  # each token has one
                state = state[given["attention_mask"].bool()]
            total, square = total + state.sum(0), square + state.square().sum(0)
            count += len(state)
    finally:
        hook.remove()
    mean_H = total / count
    variance_H = (square / count - mean_H.square()).clamp(min=0)
    energy = float((square / count).sum())
    common = float(mean_H.square().sum()) / energy
    deviation_H = variance_H.sqrt()
    least = _LEAST * (energy / len(mean_H)) ** 0.5
    if float(deviation_H.max()) < least:
        remedy = (
            "the router reads the same state for every prompt (100 % of its energy is common): end "
            "prompts in what tells them apart, or choose routing: task"
        )
        raise InputError(Fault("simoe.standardise", True, remedy))
    model.router.state_mean.copy_(mean_H)
    model.router.state_deviation.copy_(deviation_H.clamp(min=least))
    return common
