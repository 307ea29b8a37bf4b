"""Handle a loaded MoE: its routers, its k, which expert runs, where tokens went.

Everything is done to the model's own modules, by hooks that a context manager takes off again.
H hidden size, D experts, L layers, T tokens, k experts a token.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from upcycle_core.errors import Fault, InputError, raise_faults

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_FFN = ("gate_up_proj", "down_proj")
"""Weights of all experts of a layer, [D, 2 I, H] and [D, H, I]."""


def routers_of(model: nn.Module) -> list[Any]:
    """Return the router module of every MoE layer, in order.

    A router holds ``weight`` [D, H] and ``top_k`` and returns (logits [T, D], weights [T, k],
    experts [T, k]).

    Raises:
        InputError: The model is no MoE.
    """
    found = [block.gate for block in _blocks(model)]
    if not found:
        raise InputError(Fault("model", type(model).__name__, "has no routers; give a MoE"))
    return found


def set_top_k(model: "PreTrainedModel", k: int) -> None:
    """Send each token through ``k`` experts from now on.

    Raises:
        InputError: k is not between 1 and the number of experts.
    """
    routers = routers_of(model)
    experts = routers[0].weight.shape[0]
    if not 1 <= k <= experts:
        raise InputError(Fault("top_k", k, f"choose 1 to {experts}, the number of experts"))
    for block in _blocks(model):
        block.gate.top_k = k
        if hasattr(block, "top_k"):
            block.top_k = k
    model.config.num_experts_per_tok = k


def set_routers(model: nn.Module, routers: Mapping[int, torch.Tensor]) -> None:
    """Replace router weights, rounded to the model's type.

    Args:
        model: A MoE.
        routers: Layer to W [H, D]; layers that are not named keep theirs.

    Raises:
        InputError: A layer that is not there, or another shape.
    """
    modules = routers_of(model)
    faults = []
    for layer, weight_HD in routers.items():
        if not 0 <= layer < len(modules):
            faults.append(Fault(f"routers.{layer}", layer, f"choose 0 to {len(modules) - 1}"))
        elif weight_HD.T.shape != modules[layer].weight.shape:
            shape = list(modules[layer].weight.T.shape)
            faults.append(Fault(f"routers.{layer}", list(weight_HD.shape), f"must be {shape}"))
    raise_faults(faults)
    with torch.no_grad():
        for layer, weight_HD in routers.items():
            modules[layer].weight.copy_(weight_HD.T)


@contextmanager
def force_expert(model: nn.Module, index: int) -> Iterator[None]:
    """Inside, every token of every layer goes through expert ``index`` alone, with weight 1.

    Raises:
        InputError: There is no such expert.
    """
    routers = routers_of(model)
    experts = routers[0].weight.shape[0]
    if not 0 <= index < experts:
        raise InputError(Fault("expert", index, f"choose 0 to {experts - 1}"))

    def force(_module: nn.Module, _inputs: object, output: RouterOutput) -> RouterOutput:
        logits, weights, chosen = output
        return logits, torch.ones_like(weights[:, :1]), torch.full_like(chosen[:, :1], index)

    with _hooks(router.register_forward_hook(force) for router in routers):
        yield


@contextmanager
def average_experts(model: nn.Module) -> Iterator[None]:
    """Inside, every token of every layer goes through the mean of the experts, with weight 1.

    What is no routed expert stays. Beside the model, one expert of every layer is held.

    Raises:
        InputError: The experts' weights do not lie one upon the other, as in a DeRS model.
    """
    experts = [block.experts for block in _blocks(model)]
    if not all(
        isinstance(getattr(own, name, None), nn.Parameter) for own in experts for name in _FFN
    ):
        remedy = "its experts are not stored as weights that can be averaged; write it as a stock "
        remedy += "MoE first (upcycle_core.ders.expand)"
        raise InputError(Fault("model", type(model).__name__, remedy))
    with ExitStack() as stack:
        stack.enter_context(force_expert(model, 0))
        for own in experts:
            for name in _FFN:
                weight = getattr(own, name)
                mean = weight.detach().mean(dim=0, keepdim=True, dtype=torch.float32)
                setattr(own, name, nn.Parameter(mean.to(weight.dtype), requires_grad=False))
                stack.callback(setattr, own, name, weight)
            stack.callback(setattr, own, "num_experts", own.num_experts)
            own.num_experts = 1
        yield


@contextmanager
def record_routing(model: nn.Module) -> Iterator[torch.Tensor]:
    """Count, while inside, the tokens that each expert of each layer receives.

    Padding (0 in the ``attention_mask`` that the model is called with) is not counted.

    Yields:
        counts [L, D] int64 on the CPU, growing with every forward pass. A row sums to k times
        the number of tokens.
    """
    routers = routers_of(model)
    counts_LD = torch.zeros(len(routers), routers[0].weight.shape[0], dtype=torch.int64)
    masks: list[torch.Tensor | None] = [None]

    def remember(_module: nn.Module, _args: object, kwargs: Mapping) -> None:
        masks[0] = _token_mask(kwargs)

    def count(counts_D: torch.Tensor, _module: nn.Module, _args: object, out: RouterOutput) -> None:
        chosen_Tk = out[2] if masks[0] is None else out[2][masks[0]]
        counts_D += torch.bincount(chosen_Tk.reshape(-1), minlength=len(counts_D)).cpu()

    hooks = [model.register_forward_pre_hook(remember, with_kwargs=True)]
    hooks += [
        router.register_forward_hook(partial(count, counts_D))
        for router, counts_D in zip(routers, counts_LD, strict=True)
    ]
    with _hooks(iter(hooks)):
        yield counts_LD


def _blocks(model: nn.Module) -> list[Any]:
    """The sparse MoE blocks: what has experts and a gate that chooses among them."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "experts") and hasattr(getattr(module, "gate", None), "top_k")
    ]


def _token_mask(kwargs: Mapping) -> torch.Tensor | None:
    """Which of the tokens of this call are real, flat [T]; None if all are."""
    mask_BS, ids_BS = kwargs.get("attention_mask"), kwargs.get("input_ids")
    if mask_BS is None or mask_BS.dim() != 2:
        return None
    # With a key-value cache the mask covers the past as well; the call's own tokens are the last.
    length = mask_BS.shape[1] if ids_BS is None else ids_BS.shape[1]
    return mask_BS[:, -length:].reshape(-1).bool()


@contextmanager
def _hooks(handles: Iterator) -> Iterator[None]:
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
