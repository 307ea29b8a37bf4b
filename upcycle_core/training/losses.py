"""What is added to the language-model loss of a Mixture-of-Experts, layer by layer.

L layers, D experts, T tokens of a worker's micro-batch, W workers, k experts a token.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from upcycle_core.moe.inspect import routers_of
from upcycle_core.training import workers


@dataclass
class Routing:
    """What the routers said in one forward pass, in the order of the layers.

    Args:
        logits: A tensor [T, D] a layer, with the graph that made it.
        experts: A tensor [T, k] int64 a layer: the experts that a token went to.
        mask: Which tokens count: [T] bool, or None for all.
    """

    logits: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    mask: Tensor | None = None


@contextmanager
def record_routers(model: nn.Module, attention_mask: Tensor | None = None) -> Iterator[Routing]:
    """Collect what every router of ``model`` returns inside.

    Hooks are gone outside: gradient checkpointing, which runs layers again in the backward pass,
    leaves what was recorded as it is, and gradients flow through it (non-reentrant checkpointing).

    Args:
        model: A MoE whose routers return (logits, weights, experts).
        attention_mask: [B, S], 0 on padding; T = B x S.

    Yields:
        ``Routing`` of one forward pass, filled while it runs.

    Raises:
        InputError: The model has no routers.
    """
    mask = None if attention_mask is None else attention_mask.reshape(-1).bool()
    routing = Routing(mask=mask)

    def keep(_router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        routing.logits.append(output[0])
        routing.experts.append(output[2])

    with ExitStack() as stack:
        for router in routers_of(model):
            stack.callback(router.register_forward_hook(keep).remove)
        yield routing


def balance_loss(routing: Routing) -> Tensor:
    """Load-balancing loss of the Switch Transformer, a mean over layers.

    Fedus et al. 2021, eq. 4-6, for each layer: D sum_i f_i P_i, where f_i is the share of the T k
    assignments that went to expert i and P_i the router's mean probability of i. With k > 1, f
    counts each of a token's k assignments as 1/k, so that a uniform router gives 1 for every k.
    Layers are never pooled: opposite collapses in two layers must not cancel.

    Under data parallelism f is counted over the workers' micro-batches together, and P weighs every
    token the same: the mean of what the workers return is the loss of one batch that holds them
    all. A worker that accumulates micro-batches counts f in each alone, which is another loss: with
    a coefficient > 0, W workers equal one with a W times larger batch, not one that accumulates.
    Gradients flow through P alone.

    Returns:
        A scalar, in the routers' type or fp32, whichever is finer.
    """
    counts_LD = workers.total(
        torch.stack(
            [
                expert_counts(chosen, logits.shape[1], routing.mask)
                for logits, chosen in zip(routing.logits, routing.experts, strict=True)
            ]
        )
    )
    tokens = _tokens_a_worker(routing)
    layers = []
    for logits, counts_D in zip(routing.logits, counts_LD, strict=True):
        probabilities_TD = torch.softmax(at_least_fp32(logits), dim=-1)
        mean_D = _masked_sum(probabilities_TD, routing.mask) / tokens
        share_D = counts_D.to(mean_D.dtype) / counts_D.sum()
        layers.append(logits.shape[1] * (share_D * mean_D).sum())
    return torch.stack(layers).mean()


def z_loss(routing: Routing) -> Tensor:
    """Router z-loss of ST-MoE, a mean over layers.

    Zoph et al. 2022, eq. 5, for each layer: mean over tokens of (log sum_i exp logit_i)^2. The mean
    of what the workers return is that of all their tokens.

    Returns:
        A scalar, in the routers' type or fp32, whichever is finer.
    """
    tokens = _tokens_a_worker(routing)
    layers = [
        _masked_sum(torch.logsumexp(at_least_fp32(logits), dim=-1) ** 2, routing.mask) / tokens
        for logits in routing.logits
    ]
    return torch.stack(layers).mean()


def expert_counts(experts: Tensor, count: int, mask: Tensor | None) -> Tensor:
    """Tokens that each expert got: [D] int64, of ``experts`` [T, k] int64 and ``mask`` [T]."""
    counted = torch.ones_like(experts) if mask is None else mask[:, None].expand_as(experts).long()
    zeros_D = torch.zeros(count, dtype=torch.int64, device=experts.device)
    return zeros_D.index_add_(0, experts.reshape(-1), counted.reshape(-1))


def at_least_fp32(values: Tensor) -> Tensor:
    """``values`` in fp32, if they were in something coarser."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _tokens_a_worker(routing: Routing) -> Tensor:
    """Tokens that count, a mean over workers; not T, where workers hold unlike padding."""
    logits = routing.logits[0]
    mask = routing.mask
    own = torch.tensor(len(logits), device=logits.device) if mask is None else mask.sum()
    return workers.total(own) / workers.count()


def _masked_sum(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum over tokens, the first dimension."""
    if mask is None:
        return values.sum(0)
    return (values * mask.reshape(-1, *(1,) * (values.dim() - 1))).sum(0)
