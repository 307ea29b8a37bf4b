"""Parameters of a SIMoE model (arXiv 2506.12597), counted on tensors without storage.

M experts, tau the least share of zeros in their masks; a linear layer has masks over its inputs,
n of which pruning leaves.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upcycle_core.architectures.resolve import stock_faults
from upcycle_core.checkpoints.writer import ALIGNMENT, DTYPE_NAMES
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import (
    SimoeConfig,
    SimoeForCausalLM,
    SimoeForConditionalGeneration,
    gated_modules,
)
from upcycle_core.simoe.model.layers_simoe import SimoeNorm
from upcycle_core.simoe.upcycle import simoe_config

_HEADER_LENGTH = 8
"""Bytes before a safetensors header, which hold its length."""
_TYPED = (".index", ".mask")
"""Tensors that have a type of their own, whatever the model's."""


@dataclass(frozen=True)
class Counts:
    """Numbers of a SIMoE model as it is trained, and what pruning can be expected to leave.

    Args:
        dense: Parameters of the pre-trained model; an embedding that is also the head counts once.
        linear: Of theta_delta in the linear layers that are gated.
        norms: Of theta_delta in the norms that are gated.
        masks: Entries of all M masks.
        router: Parameters of the router.
        experts: M.
        tau: Least share of expert parameters whose mask is zero; 0 of ``real`` masks.
    """

    dense: int
    linear: int
    norms: int
    masks: int
    router: int
    experts: int
    tau: float

    @property
    def gated(self) -> int:
        """Numbers of theta_delta: each of them may be an expert's parameter."""
        return self.linear + self.norms

    @property
    def trained(self) -> int:
        """Parameters that are trained: theta_delta, masks and router."""
        return self.gated + self.masks + self.router

    @property
    def by_mean(self) -> int:
        """The paper's way, as we read it: the dense model and the share 1 - tau, the mean density
        of the masks, of theta_delta and of the masks themselves, which weigh something where each
        parameter has entries of its own. The router is not in it."""
        return self.dense + round((1 - self.tau) * (self.gated + self.masks))

    @property
    def by_independent_union(self) -> int:
        """The dense model and what M masks of density 1 - tau use together of theta_delta if they
        are independent, the share 1 - tau^M. Masks and router are not in it."""
        return self.dense + round((1 - self.tau**self.experts) * self.gated)


@dataclass(frozen=True)
class Saved:
    """What the safetensors file of a pruned model holds.

    Args:
        dense: Numbers of the pre-trained model.
        deltas: Of theta_delta, the columns that are left: [out, n] a linear layer.
        indices: Of the inputs that are left, int32: [n] a module.
        masks: Entries of the masks there, fp32: [M, n] a module.
        router: Numbers of the router.
        bytes: Size of the file, its header included.
    """

    dense: int
    deltas: int
    indices: int
    masks: int
    router: int
    bytes: int

    @property
    def parameters(self) -> int:
        """All numbers but the indices."""
        return self.dense + self.deltas + self.masks + self.router


def count(
    dense: Mapping[str, Any], simoe: SimoeUpcyclingConfig, *, tasks: Sequence[str] = ()
) -> Counts:
    """Count the parameters of a SIMoE model, by building it on the meta device.

    Args:
        dense: The content of the dense model's config.json.
        simoe: Experts, tau, layers, masks, routing.
        tasks: Names of the tasks, where each has coefficients of its own.

    Raises:
        InputError: What cannot be upcycled so.
    """
    model = _on_meta(_checked_config(dense, simoe, tasks))
    sizes = dict.fromkeys(("linear", "norms", "masks"), 0)
    for module in gated_modules(model).values():
        kind = "norms" if isinstance(module, SimoeNorm) else "linear"
        sizes[kind] += module.delta.numel()
        sizes["masks"] += module.log_phi.numel()
    sizes["router"] = sum(parameter.numel() for parameter in model.router.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    tau = simoe.tau if simoe.is_constrained else 0.0
    return Counts(whole - sum(sizes.values()), **sizes, experts=simoe.experts, tau=tau)


def pruned_config(
    dense: Mapping[str, Any], simoe: SimoeUpcyclingConfig, share: float
) -> SimoeConfig:
    """The configuration of the model that is left if every module keeps ``share`` of its inputs.

    Args:
        dense: The content of the dense model's config.json.
        simoe: Experts, layers, masks, routing.
        share: In [0, 1]; ``1 - tau`` at most where tau holds the union, ``1 - tau ** M`` where
            masks of density 1 - tau are independent.

    Raises:
        InputError: What cannot be upcycled so.
    """
    config = _checked_config(dense, simoe, ())
    modules = gated_modules(_on_meta(config))
    config.kept = {name: round(share * gate.log_phi.shape[-1]) for name, gate in modules.items()}
    return config


def saved(config: SimoeConfig) -> Saved:
    """Count what the file of a pruned model holds; no weight is read.

    Args:
        config: Of a pruned model, with ``kept``.

    Raises:
        InputError: The model is not pruned.
    """
    if config.kept is None:
        remedy = "the model is not pruned; give the configuration of a pruned one"
        raise InputError(Fault("config.kept", None, remedy))
    model = _on_meta(config)
    tensors = _stored(model)
    sizes = dict.fromkeys(("deltas", "indices", "masks", "router"), 0)
    for module in gated_modules(model).values():
        for kind, part in (("deltas", "delta"), ("indices", "index"), ("masks", "mask")):
            sizes[kind] += getattr(module, part).numel()
    sizes["router"] = sum(parameter.numel() for parameter in model.router.parameters())
    whole = sum(tensor.numel() for tensor in tensors.values())
    return Saved(whole - sum(sizes.values()), **sizes, bytes=_file_bytes(tensors))


def _checked_config(
    dense: Mapping[str, Any], simoe: SimoeUpcyclingConfig, tasks: Sequence[str]
) -> SimoeConfig:
    raise_faults([*simoe.faults("simoe"), *stock_faults(dense, "config.model_type")])
    try:
        return simoe_config(dict(dense), simoe, tasks=tasks)
    except ValueError as error:
        raise InputError(Fault("simoe", dense["model_type"], str(error))) from error


def _on_meta(config: SimoeConfig) -> Any:
    kind = SimoeForConditionalGeneration if config.is_encoder_decoder else SimoeForCausalLM
    try:
        with torch.device("meta"):
            return kind(config)
    except ValueError as error:
        raise InputError(Fault("config", config.dense.model_type, str(error))) from error


def _stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors that are written, each under one of its names, in the types that they have there."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    dtype = model.config.dtype or torch.float32
    return {
        name: tensors[name] if name.endswith(_TYPED) else tensors[name].to(dtype)
        for name in first.values()
    }


def _file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Header and data of one safetensors file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = len(json.dumps(entries, separators=(",", ":")))
    return _HEADER_LENGTH + math.ceil(header / ALIGNMENT) * ALIGNMENT + offset
