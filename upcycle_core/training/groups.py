"""Which parameters are trained, chosen by exact module and never by a piece of a name.

E experts, H hidden size, I intermediate size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upcycle_core.errors import Fault, InputError
from upcycle_core.moe.inspect import routers_of
from upcycle_core.training.checks import objective_faults
from upcycle_core.training.config import Group, MoEObjective

_CHOOSING = "e_score_correction_bias"

Part = Literal["router", "experts", "base", "backbone"]


@dataclass(frozen=True)
class Trainable:
    """What ``select_trainable`` chose.

    Args:
        trained: Parameters (numbers, not tensors) that are trained.
        total: Parameters of the model; tied ones count once.
        undecayed: Names of tensors that must not decay, because a part of each stays as it is.
    """

    trained: int
    total: int
    undecayed: frozenset[str]


def select_trainable(model: nn.Module, groups: Sequence[Group]) -> Trainable:
    """Freeze every parameter of ``model`` that is in none of ``groups``.

    ``router``: the routers of the MoE blocks. ``experts``: their experts. ``shared_base``: the FFNs
    that experts are deltas of (DeRS). ``backbone``: all else, shared experts and embeddings
    included. ``expert_gates``: the gate matrices of the experts. In stock models these are the
    first half of the fused ``gate_up_proj`` [E, 2I, H]; a hook sets the other half's gradient to
    zero, and the tensor has no weight decay, so that AdamW leaves the up matrices as they are, bit
    for bit. ``all``: everything.

    A module of an own architecture joins a group with an attribute
    ``parameter_group: "router" | "experts" | "base" | "backbone"``, which holds for all that is
    inside it. A bias that only decides which experts are chosen has no gradient and stays as it is.

    Args:
        model: Freshly loaded; changed in place.
        groups: What to train.

    Raises:
        InputError: An unknown group, or one that the model has no parameters of.
    """
    faults = list(objective_faults(MoEObjective(trainable=tuple(groups))))
    if faults:
        raise InputError(*faults)
    parts = parts_of(model)
    chosen = _chosen(parts, groups)
    halves = set(chosen) if not {"all", "experts"} & set(groups) else set()
    halves = {name for name in halves if parts[name] == "experts" and _is_fused(name)}
    trained = total = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
        total += parameter.numel()
        if name in halves:
            trained += parameter.numel() // 2
            parameter.register_hook(_first_half)
        elif name in chosen:
            trained += parameter.numel()
    return Trainable(trained, total, frozenset(halves))


def keep_up_matrices(model: nn.Module, halves: frozenset[str]) -> None:
    """Let the up matrices in fused experts of a divided model stay as they are, see above."""
    for name, parameter in model.named_parameters():
        if name in halves:
            parameter.register_post_accumulate_grad_hook(_without_second_half)


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return the part that every parameter of ``model`` belongs to, by its name.

    Raises:
        InputError: A module's ``parameter_group`` is none that there is.
    """
    parts: dict[str, Part] = {name: "backbone" for name, _ in model.named_parameters()}
    for module, part in _marked(model):
        if part not in get_args(Part):
            remedy = f"no such group; choose {', '.join(get_args(Part))}"
            raise InputError(Fault(f"{module}.parameter_group", part, remedy))
        inside = f"{module}." if module else ""
        parts |= {name: part for name in parts if name.startswith(inside)}
    return parts


def _marked(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """Modules that are a part, by name; what lies inside another comes after it."""
    try:
        routers = {id(router) for router in routers_of(model)}
    except InputError:  # dense, or an architecture of its own
        routers = set()
    experts = {id(m.experts) for m in model.modules() if id(getattr(m, "gate", None)) in routers}
    for name, module in model.named_modules():
        if hasattr(module, "parameter_group"):
            yield name, module.parameter_group
        elif id(module) in routers:
            yield name, "router"
        elif id(module) in experts:
            yield name, "experts"


def _chosen(parts: dict[str, Part], groups: Sequence[Group]) -> set[str]:
    chosen: set[str] = set()
    for group in groups:
        if group == "all":
            named = set(parts)
        elif group == "expert_gates":
            named = {name for name in parts if parts[name] == "experts" and _is_gate(name)}
        else:
            part = "base" if group == "shared_base" else group
            named = {name for name in parts if parts[name] == part}
        named = {name for name in named if name.rpartition(".")[2] != _CHOOSING}
        if not named:
            remedy = "the model has no such parameters; train what it has"
            raise InputError(Fault("objective.trainable", group, remedy))
        chosen |= named
    return chosen


def _is_fused(name: str) -> bool:
    return name.split(".")[-1] == "gate_up_proj"


def _is_gate(name: str) -> bool:
    """Whether an expert's tensor holds gate matrices: fused, or a linear layer of its own."""
    return _is_fused(name) or "gate_proj" in name.split(".")


def _without_second_half(parameter: Tensor) -> None:
    assert isinstance(parameter.grad, DTensor)
    gradient_eJH = parameter.grad.to_local()  # a worker's part: of the experts, or of H
    gradient_eJH.chunk(2, dim=1)[1].zero_()


def _first_half(gradient_EJH: Tensor) -> Tensor:
    gate, up = gradient_EJH.chunk(2, dim=1)
    return torch.cat((gate, torch.zeros_like(up)), dim=1)
