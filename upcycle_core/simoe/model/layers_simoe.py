"""Linear layers and norms with experts: theta = theta_pre + sum_i alpha_i z_i * theta_delta.

Masks gate inputs, so a linear layer is y = theta_pre x + theta_delta (g * x) with
g = sum_i alpha_i z_i (Eq. 2 and 9): two products, and no weights of an instance's own.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.

B batch, S positions, I inputs, O outputs, n inputs that are left after pruning, M experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from .configuration_simoe import SimoeConfig
from .gates_simoe import draw_log_phi, median
from .routing_simoe import Mixture

_FFN = {"mlp", "ffn", "feed_forward", "DenseReluDense", "fc1", "fc2"}


class Gated(nn.Module):
    """What gated linear layers and norms share.

    Args:
        base: The pre-trained module, kept as ``base``.
        config: The model's.
        mixture: Where coefficients come from.
        inputs: I.
        outputs: O; None for a norm.
        kept: n, of a pruned model.
    """

    base: Any

    def __init__(
        self,
        base: nn.Module,
        config: SimoeConfig,
        mixture: Mixture,
        *,
        inputs: int,
        outputs: int | None,
        kept: int | None,
    ) -> None:
        super().__init__()
        self.base = base
        self.mixture = mixture
        self.inputs, self.outputs, self.kept = inputs, outputs, kept
        self.by_parameter = config.masks == "parameters" and outputs is not None
        self.is_real, self.reopen = config.masks == "real", config.reopen
        left = inputs if kept is None else kept
        rows = [outputs] if self.by_parameter and outputs is not None else []
        gates = (config.num_simoe_experts, *rows, left)
        if kept is None:
            self.delta = nn.Parameter(torch.zeros_like(self.base.weight))
            log_phi = draw_log_phi(gates, config.initial_spread)
            self.log_phi = nn.Parameter(median(log_phi) if self.is_real else log_phi)
        else:
            shape = (left,) if outputs is None else (outputs, left)
            self.delta = nn.Parameter(self.base.weight.new_zeros(shape))
            self.register_buffer("index", torch.arange(left, dtype=torch.int32))
            self.register_buffer("mask", torch.zeros(gates))

    def __getattr__(self, name: str) -> Any:
        """What the pre-trained module has and this one does not, ``weight`` or ``in_features``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(super().__getattr__("base"), name)

    @property
    def weights_per_gate(self) -> int:
        """Parameters of an expert that one gate decides about."""
        return 1 if self.by_parameter or self.outputs is None else self.outputs

    def masks(self) -> Tensor:
        """z of every expert, fp32: [M, I], [M, O, I] with a gate a parameter, [.., n] pruned."""
        if self.kept is not None:
            return self.mask
        return self.log_phi if self.is_real else median(self.log_phi, reopen=self.reopen)

    def _mixed(self, alpha: Tensor) -> Tensor:
        """g = sum_i alpha_i z_i, [B, n] or [B, S, n] in the masks' type."""
        z = self.masks()
        with torch.autocast(alpha.device.type, enabled=False):
            return alpha.to(z) @ z


class SimoeLinear(Gated):
    """A linear layer (or GPT-2's transposed one) with experts."""

    def __init__(self, base: Any, config: SimoeConfig, mixture: Mixture, kept: int | None) -> None:
        self_transposed = isinstance(base, Conv1D)
        outputs, inputs = reversed(base.weight.shape) if self_transposed else base.weight.shape
        super().__init__(base, config, mixture, inputs=inputs, outputs=outputs, kept=kept)
        self.is_transposed = self_transposed and kept is None

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., O] of x [..., I]."""
        y = self.base(x)
        alpha = self.mixture.read()
        if alpha is None or self.kept == 0:
            return y
        if self.kept is not None and self.kept < self.inputs:
            x = x.index_select(-1, self.index)
        delta = self.delta.T if self.is_transposed else self.delta
        if not self.by_parameter:
            return _AddProduct.apply(y, x, spread(self._mixed(alpha), x), delta).view(y.shape)
        for share, z in zip(alpha.unbind(-1), self.masks().unbind(0), strict=True):
            part = x * spread(share.unsqueeze(-1), x).to(x)
            y = y + functional.linear(part, delta * z.to(delta.dtype))
        return y


class SimoeNorm(Gated):
    """A norm with experts in its weight; its bias, if any, stays."""

    def __init__(self, base: Any, config: SimoeConfig, mixture: Mixture, kept: int | None) -> None:
        size = len(base.weight)
        super().__init__(base, config, mixture, inputs=size, outputs=None, kept=kept)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., I]."""
        alpha = self.mixture.read()
        if alpha is None or self.kept == 0:
            return self.base(x)
        change = self._mixed(alpha) * self.delta
        if self.kept is not None:
            whole = change.new_zeros(*change.shape[:-1], self.inputs)
            change = whole.index_copy(-1, self.index.long(), change)
        change = spread(change.to(self.base.weight.dtype), x)
        if isinstance(self.base, nn.LayerNorm):  # takes one weight for all instances
            plain = functional.layer_norm(x, (self.inputs,), None, None, self.base.eps)
            return self.base(x) + change * plain
        return self._with(self.base.weight + change, x)

    def _with(self, weight: Tensor, x: Tensor) -> Tensor:
        """The norm of x with another weight, in a copy: torch's ``functional_call`` would exchange
        it in the module, where other threads are."""
        kind = type(self.base)
        own = object.__new__(kind)
        others = {n: p for n, p in self.base._parameters.items() if n != "weight"}
        own.__dict__.update({**self.base.__dict__, "_parameters": others, "weight": weight})
        return kind.forward(own, x)


class _AddProduct(torch.autograd.Function):
    """y + (g * x) delta^T. Nothing is kept for the backward pass but its arguments: g * x, which
    every layer has of its own where x is shared, is computed again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, g: Tensor, delta: Tensor) -> Tensor:
        """Return [N, O], not yet in the shape of y [..., O], of x [..., n], g that multiplies x,
        and delta [O, n]: a view that is made here could not be added to in place, as Falcon does.
        """
        ctx.save_for_backward(x, g, delta)
        u = (x * g.to(x.dtype)).to(y.dtype).flatten(0, -2)
        return torch.addmm(y.flatten(0, -2), u, delta.to(y.dtype).T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of y, x, g and delta."""
        x, g, delta = ctx.saved_tensors
        gy = gradients[0].reshape(*x.shape[:-1], -1)
        _, needs_x, needs_g, needs_delta = ctx.needs_input_grad
        gx = gg = gdelta = None
        if needs_delta:
            u = (x * g.to(x.dtype)).to(gy.dtype).flatten(0, -2)
            gdelta = (gy.flatten(0, -2).T @ u).to(delta.dtype)
        if needs_x or needs_g:
            gu = (gy @ delta.to(gy.dtype)).to(x.dtype)
            gx = gu * g.to(x.dtype) if needs_x else None
            repeated = [d for d, size in enumerate(g.shape) if size == 1 and x.shape[d] != 1]
            gg = gu * x
            gg = gg.sum(repeated, keepdim=True, dtype=g.dtype) if repeated else gg.to(g.dtype)
        return gy, gx, gg, gdelta


def spread(g: Tensor, x: Tensor) -> Tensor:
    """Shape ``g`` [B, n] or [B, S, n] so that it multiplies ``x``.

    Args:
        g: Numbers of an instance, or of a token.
        x: [B, S, n], [B S, n], or with heads [B, S, heads, n] or [B, heads, S, n].
    """
    if x.dim() == 2:
        return g.flatten(0, 1) if g.dim() == 3 else g.repeat_interleave(len(x) // len(g), dim=0)
    if g.dim() == 2:
        return g.view(len(g), *[1] * (x.dim() - 2), g.shape[-1])
    if x.dim() == 3:
        return g
    first = x.shape[1] == g.shape[1]
    if (
        first and x.shape[2] == x.shape[1]
    ):  # as many heads as positions: positions lie further apart
        first = x.stride(1) >= x.stride(2)
    return g.unsqueeze(2 if first else 1)


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a norm with a weight a feature."""
    weight = getattr(module, "weight", None)
    named = "norm" in type(module).__name__.lower()
    return named and isinstance(weight, Tensor) and weight.dim() == 1 and not [*module.children()]


def is_gated(name: str, module: nn.Module, config: SimoeConfig, heads: set[int]) -> bool:
    """Whether a module of the dense model gets experts.

    Args:
        name: Its name.
        module: The module.
        config: The model's.
        heads: ids of output heads.
    """
    linear = isinstance(module, nn.Linear | Conv1D)
    if id(module) in heads:
        return linear and config.lm_head and not config.dense.tie_word_embeddings
    if config.layers == "ffn":
        return linear and not _FFN.isdisjoint(name.split("."))
    return linear or is_norm(module)


def put_experts(model: Any, config: SimoeConfig, mixture: Mixture, prefix: str) -> None:
    """Replace layers of a dense model by gated ones.

    Args:
        model: The dense model, changed in place.
        config: The whole model's.
        mixture: Where coefficients come from.
        prefix: What names of its modules begin with in the whole model.

    Raises:
        ValueError: Nothing to replace, or a pruned configuration of other layers.
    """
    head = model.get_output_embeddings()
    heads = set() if head is None else {id(head)}
    chosen = [n for n, m in model.named_modules() if is_gated(n, m, config, heads)]
    names = {prefix + name for name in chosen}
    if not chosen or (config.kept is not None and set(config.kept) != names):
        remedy = "fits no layer" if not chosen else "and kept name other layers than there are"
        raise ValueError(f"layers = {config.layers!r}: {remedy} of {type(model).__name__}")
    for name in chosen:
        module = model.get_submodule(name)
        kind = SimoeNorm if is_norm(module) else SimoeLinear
        left = None if config.kept is None else config.kept[prefix + name]
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, kind(module, config, mixture, left))
