"""What a paper adds to the training of a language model, seen from ``CausalTrainer``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import TrainerCallback

from upcycle_core.errors import InputError
from upcycle_core.training.config import TrainingConfig

_STATE = "extension.json"


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike.

    Args:
        names: Their names in the model.
        learning_rate: Peak learning rate, on the schedule of the others; the training's by default.
        decays: Whether the training's weight decay holds for those that usually decay.
        clipped_apart: Whether their gradients are clipped by their own norm, with the training's
            limit, and are no part of the others' norm.
    """

    names: frozenset[str]
    learning_rate: float | None = None
    decays: bool = True
    clipped_apart: bool = False


class Extension(Protocol):
    """Losses, optimizer groups and a state of its own beside the model's.

    Every worker has one and asks it the same things in the same order. It sees the same weights on
    all of them.
    """

    def penalty(self) -> Tensor:
        """What is added to the text's loss, a scalar; its gradients go to the model's weights."""

    def groups(self) -> Sequence[ParameterGroup]:
        """All trained parameters, each in one group; the first one's learning rate is reported."""

    def after_step(self, step: int) -> None:
        """Look at the weights after optimizer step ``step``; may change them.

        Raises:
            FloatingPointError: Something is not finite; no checkpoint is written of it.
        """

    def point(self) -> Mapping[str, float]:
        """Values for the curves, as they are after the last step."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint must hold of it beside the weights, JSON values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave; the weights are already those of the checkpoint."""

    def may_keep(self, point: Mapping[str, float]) -> bool:
        """Whether the training may end with the weights of a checkpoint, by its curves' point."""

    def nothing_to_keep(self, point: Mapping[str, float]) -> InputError:
        """The error of a training that has no such checkpoint; ``point`` is its last."""


class AfterStep(TrainerCallback):
    """Calls ``Extension.after_step`` before anything is logged or saved."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension

    def on_step_end(self, args, state, control, **_):
        self._extension.after_step(state.global_step)


def optimizer_groups(
    model: nn.Module,
    groups: Sequence[ParameterGroup],
    config: TrainingConfig,
    decaying: Sequence[str],
) -> list[dict[str, Any]]:
    """Groups as PyTorch's optimizers take them, each split into what decays and what does not.

    Args:
        model: What is trained; frozen parameters are in no group.
        groups: All trained parameters.
        config: Learning rate and weight decay where a group has none of its own.
        decaying: Names of parameters that usually decay.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = [name for group in groups for name in group.names]
    assert sorted(named) == sorted(parameters), "each trained parameter is in one group"
    found = []
    for group in groups:
        decayed = set(decaying) & group.names if group.decays else set()
        rate = config.learning_rate if group.learning_rate is None else group.learning_rate
        for chosen, decay in ((decayed, config.weight_decay), (group.names - decayed, 0.0)):
            own = [parameter for name, parameter in parameters.items() if name in chosen]
            if own:
                found.append({"params": own, "lr": rate, "weight_decay": decay})
    return found


def clipped_together(model: nn.Module, extension: Extension | None) -> list[list[nn.Parameter]]:
    """Sets of parameters whose gradients are clipped by one norm; that of the first is reported."""
    apart = [group for group in extension.groups() if group.clipped_apart] if extension else []
    parameters = dict(model.named_parameters())
    sets = [[p for name, p in parameters.items() if name in group.names] for group in apart]
    own = {name for group in apart for name in group.names}
    return [[p for name, p in parameters.items() if name not in own], *sets]


def save_state(extension: Extension, directory: Path) -> None:
    """Write what the extension says of itself into a checkpoint."""
    (directory / _STATE).write_text(json.dumps(dict(extension.state())))


def load_state(extension: Extension, directory: Path) -> None:
    """Let the extension go on from a checkpoint."""
    extension.load_state(json.loads((directory / _STATE).read_text()))
