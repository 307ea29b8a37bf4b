"""What is watched while a Mixture-of-Experts is trained: load, router entropy, gradient norms.

L layers, D experts, T tokens, k experts a token.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from upcycle_core.errors import InputError
from upcycle_core.moe.inspect import routers_of
from upcycle_core.training import workers
from upcycle_core.training.losses import Routing, at_least_fp32, expert_counts

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


class Watch:
    """Sums since the last point, and the point made of them.

    A point holds, by key:
        ``load/layer_{l}/expert_{e}``: share [L, D] of the layer's T k assignments that went to
            the expert, over all workers' tokens since the last point; a layer's shares sum to 1.
        ``router_entropy/layer_{l}``: entropy [L] of the router's probabilities over its D experts,
            in nats, a mean over the same tokens; log D if it is undecided.
        ``gradient_norm/layer_{l}``: norm [L] of the gradient of the layer's trained parameters,
            before clipping, of the point's own step. Embeddings, final norm and head are in none.

    l is the number of the decoder layer. Padding does not count. A dense model has the norms alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = router_layers(model)
        self._layers = _parameters_by_layer(model)
        self._norms: list[Tensor] = []
        self._reset()

    def add(self, routing: Routing) -> None:
        """Count one forward pass."""
        with torch.no_grad():
            for place, logits in enumerate(routing.logits):
                mask = routing.mask
                self._counts[place] = self._counts[place] + expert_counts(
                    routing.experts[place], logits.shape[1], mask
                )
                logp_TD = torch.log_softmax(at_least_fp32(logits), dim=-1)
                entropy_T = -(logp_TD.exp() * logp_TD).sum(-1).double()
                weight_T = torch.ones_like(entropy_T) if mask is None else mask.double()
                sums = torch.stack([(entropy_T * weight_T).sum(), weight_T.sum()])
                self._entropy[place] = self._entropy[place] + sums

    def gradients(self) -> None:
        """Take the gradients' norms, as they are now."""
        self._norms = [
            workers.whole(
                torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            )
            for parameters in self._layers.values()
        ]

    def point(self) -> dict[str, float]:
        """The point's values by key; sums start again at zero. All workers must call it."""
        values: dict[str, float] = {}
        for place, layer in enumerate(self._routers):
            counts_D = workers.total(self._counts[place])
            entropy, tokens = workers.total(self._entropy[place]).tolist()
            for expert, share in enumerate((counts_D.double() / counts_D.sum()).tolist()):
                values[f"load/layer_{layer}/expert_{expert}"] = share
            values[f"router_entropy/layer_{layer}"] = entropy / tokens
        for layer, norm in zip(self._layers, self._norms, strict=True):
            values[f"gradient_norm/layer_{layer}"] = norm.item()
        self._reset()
        return values

    def _reset(self) -> None:
        self._counts: list[Any] = [0] * len(self._routers)
        self._entropy: list[Any] = [0] * len(self._routers)


def router_layers(model: nn.Module) -> list[int]:
    """Decoder layer of every router, in order; [] for a dense model."""
    try:
        routers = routers_of(model)
    except InputError:
        return []
    names = {id(module): name for name, module in model.named_modules()}
    found = [_LAYER.search(names[id(router)]) for router in routers]
    return [int(match[1]) if match else place for place, match in enumerate(found)]


def loads(curves: Sequence[Mapping[str, float]]) -> list[tuple[int, int, int, float]]:
    """Every load in ``curves``, as (step, layer, expert, share), in that order."""
    key = re.compile(r"load/layer_(\d+)/expert_(\d+)")
    return [
        (int(point["step"]), int(match[1]), int(match[2]), share)
        for point in curves
        for name, share in point.items()
        if (match := key.fullmatch(name))
    ]


def _parameters_by_layer(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """Trained parameters of every decoder layer; the list of a frozen layer is empty."""
    layers: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if match := _LAYER.search(name):
            own = layers.setdefault(int(match[1]), [])
            own += [parameter] if parameter.requires_grad else []
    return layers
