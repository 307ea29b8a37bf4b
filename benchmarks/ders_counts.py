"""Parameters that upcycling adds to a dense model, counted on tensors without storage.

N experts, H hidden size, I intermediate size, L MoE layers, p drop rate, r rank. What comes out is,
with F the numbers of one FFN's matrices (3 H I if it is gated, else 2 H I) and S the sum of their
sides (3 (H + I), or 2 (H + I)):

    vanilla L (N - 1) F, sparse L N (1 - p) F, low rank L N r S, each with L N H of the routers,

L F more for a universal FFN of its own, N + 1 for N where it is one more delta. Where the FFN has
biases, each expert has its own, as N copies have.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModel

from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.source import dense_config
from upcycle_core.ders.upcycle import ders_config, moe_layers
from upcycle_core.errors import Fault, InputError

UNIVERSAL, ROUTER = ".mlp.universal.", ".mlp.gate.weight"


@dataclass(frozen=True)
class Added:
    """Parameters of an upcycled model that its dense model does not have, in numbers.

    Args:
        experts: Of the experts: those of N copies but one, or of the deltas and their biases.
        routers: Of the routers, N H a layer.
        universal: Of universal FFNs with weights of their own.
    """

    experts: int
    routers: int
    universal: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.experts + self.routers + self.universal


def added_by_ders(dense: Mapping[str, Any], config: DersUpcyclingConfig, *, experts: int) -> Added:
    """Count what DeRS upcycling adds (section 3.4), by building both models on the meta device.

    Args:
        dense: The content of the dense model's config.json.
        config: Codec, its drop rate or rank, layers, universal FFN.
        experts: N.

    Raises:
        InputError: What cannot be upcycled so.
    """
    upcycled = ders_config(dense, config, experts=experts, top_k=1)
    with torch.device("meta"):
        return _difference(AutoModel.from_config(upcycled), _dense_model(dense))


def added_by_copies(
    dense: Mapping[str, Any],
    *,
    experts: int,
    layers: Literal["all", "every-other"] = "all",
    universal: bool = False,
) -> Added:
    """Count what vanilla upcycling adds: N copies of each FFN, and a router.

    Args:
        dense: The content of the dense model's config.json.
        experts: N.
        layers: Blocks that become Mixture-of-Experts.
        universal: Whether every token passes through one copy more.

    Raises:
        InputError: Fewer than two experts, or a dense model without ``layers`` and ``mlp``.
    """
    if experts < 2:
        raise InputError(Fault("experts", experts, "must be 2 or more"))
    with torch.device("meta"):
        model = _dense_model(dense)
        for layer in moe_layers(layers, len(model.layers)):
            block = nn.Module()
            ffn = model.layers[layer].mlp
            block.experts = nn.ModuleList(copy.deepcopy(ffn) for _ in range(experts))
            block.gate = nn.Linear(model.config.hidden_size, experts, bias=False)
            if universal:
                block.universal = ffn
            model.layers[layer].mlp = block
        return _difference(model, _dense_model(dense))


def _dense_model(dense: Mapping[str, Any]) -> Any:
    model = AutoModel.from_config(dense_config(dense))
    layers = getattr(model, "layers", None)
    if not layers or not hasattr(layers[0], "mlp"):
        remedy = "its blocks are not called layers, or have no mlp; give the dense text model"
        raise InputError(Fault("config.model_type", dense.get("model_type"), remedy))
    return model


def _difference(upcycled: nn.Module, dense: nn.Module) -> Added:
    sizes = {name: parameter.numel() for name, parameter in upcycled.named_parameters()}
    universal = sum(size for name, size in sizes.items() if UNIVERSAL in name)
    routers = sum(size for name, size in sizes.items() if name.endswith(ROUTER))
    before = sum(parameter.numel() for parameter in dense.parameters())
    return Added(sum(sizes.values()) - before - universal - routers, routers, universal)
