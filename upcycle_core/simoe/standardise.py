"""What a SIMoE router's states have in common: told, and taken from them (not in the paper).

The last token of a prompt is often the same, and with it most of its state: a router that starts
near zero then sees every prompt alike, and one expert wins them all.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress, Silent
from upcycle_core.training.rows import collate

PROMPTS = 1024
"""Training prompts that mean and deviation are taken of."""
SOME = 128
"""The same where only the common share is told."""
_AT_ONCE = 16
_TOKENS = 1 << 13
"""Read at once, where the training's own batch is not more."""
_LEAST = 1e-4
"""Of the states' size: a deviation below is none."""


@torch.no_grad()
def common_states(
    model: Any,
    rows: Dataset,
    *,
    batch_size: int = 1,
    prompts: int | None = None,
    progress: Progress | None = None,
) -> float:
    """How much of a router's states the first rows of a training have in common.

    A router that standardises gets their mean and deviation.

    Args:
        model: Upcycled, in evaluation mode.
        rows: As for ``training.trainer.train``: [S] ``input_ids``, ``labels``, ``attention_mask``.
        batch_size: Rows that fit at once in training.
        prompts: How many rows are read; by default ``PROMPTS``, or ``SOME`` where nothing is set.
        progress: Hears of every batch; told the share with the last.

    Returns:
        The share of the states' energy that all prompts have in common, ||mean h||^2 / mean
        ||h||^2.

    Raises:
        InputError: The state is the same for every prompt, and was to be standardised: nothing
            could be routed by it.
    """
    standardises = model.router.standardises
    count = min(prompts or (PROMPTS if standardises else SOME), len(rows))  # type: ignore[arg-type]  # it has a length
    progress = progress or Silent()
    progress.start("states that the router reads", count, "prompts")
    total, square, seen = _sums(model, rows, count, batch_size, progress)
    mean_H = total / seen
    variance_H = (square / seen - mean_H.square()).clamp(min=0)
    energy = float((square / seen).sum())
    common = float(mean_H.square().sum()) / energy
    progress.advance(0, common=common)
    if not standardises:
        return common
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


def _sums(
    model: Any, rows: Any, count: int, batch_size: int, progress: Progress
) -> tuple[Tensor, Tensor, int]:
    """Sums [H] of states and of their squares, fp64, and over how many."""
    states: list[Tensor] = []
    hook = model.router.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    total: Any = 0
    square: Any = 0
    seen = 0
    first = rows[0]
    length = len(first if isinstance(first, Tensor) else first["input_ids"])
    at_once = min(max(batch_size, _TOKENS // length), _AT_ONCE)
    try:
        for start in range(0, count, at_once):
            batch = collate([rows[i] for i in range(start, min(start + at_once, count))])
            given = {name: value.to(model.device) for name, value in batch.items()}
            known = ("input_ids", "attention_mask", "labels")
            model.coefficients(**{name: given[name] for name in known if name in given})
            state = states.pop().double()
            if state.dim() == 3:  # each token has one
                state = state[given["attention_mask"].bool()]
            total, square = total + state.sum(0), square + state.square().sum(0)
            seen += len(state)
            progress.advance(len(batch["input_ids"]))
    finally:
        hook.remove()
    return total, square, seen
