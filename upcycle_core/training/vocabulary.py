"""Embedding and head that workers divide by rows of the vocabulary, and that nobody holds whole.

A worker computes its own rows for the tokens of all: states go to the rows, not rows to the states
(Megatron-LM, arXiv 1909.08053, section 3). Of a vocabulary of 128 thousand that is less to send
than the matrix where a batch has fewer tokens, and always less to hold.

W workers, N tokens of a worker, n of a slice, V vocabulary, v rows of a worker, H hidden size. All
workers must call the same things in the same order; what they call them with may be of unequal
length.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed, nn

from upcycle_core.training import workers
from upcycle_core.training.rows import NO_LOSS

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

# Called so from PyTorch 2.13 on.
all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
NUMBERS = 1 << 22
"""Numbers of the states of all workers that are held at once."""
NOBODYS = -1
"""In place of a token where a worker has fewer than others."""


def can_divide(network: "PreTrainedModel") -> bool:
    """Whether the embedding is nothing but rows, and the head nothing but a matrix."""
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    return plain and type(head) is nn.Linear and head.bias is None


def divide(network: "PreTrainedModel", mesh: "DeviceMesh") -> set[nn.Parameter]:
    """Leave each worker 1 / W of the rows of embedding and head; in place.

    Args:
        network: ``can_divide``; both are of the types and at the place where they are trained.
        mesh: Of all workers.

    Returns:
        The parameters, of the names that they had; tied ones stay one.
    """
    embedding: Any = network.get_input_embeddings()
    head: Any = network.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    embedding.weight = _divided(embedding.weight, mesh)
    embedding.forward = partial(_look_up, embedding)
    head.weight = embedding.weight if is_tied else _divided(head.weight, mesh)
    return {embedding.weight, head.weight}


def undo(network: "PreTrainedModel") -> None:
    """Give the embedding its own forward pass back; weights stay divided."""
    vars(network.get_input_embeddings()).pop("forward", None)


def _divided(weight: nn.Parameter, mesh: "DeviceMesh") -> nn.Parameter:
    # Each worker cuts its part out of what it has; nothing is sent. What it has is freed then.
    from torch.distributed.tensor import Shard, distribute_tensor

    part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    own = _as(part, part.to_local().clone())
    return nn.Parameter(own, requires_grad=weight.requires_grad)


def _look_up(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    found_NH = DividedRows.apply(ids.flatten(), embedding.weight, embedding.padding_idx)
    return cast(Tensor, found_NH).view(*ids.shape, -1)


class DividedRows(torch.autograd.Function):
    """Rows of a divided matrix, by their numbers."""

    @staticmethod
    def forward(ctx: Any, ids_N: Tensor, weight_VH: "DTensor", padding: int | None) -> Tensor:
        """Args: int64 numbers, the matrix, a number whose row learns nothing; [N, H]."""
        own_vH, first = _own(weight_VH)
        found_NH = own_vH.new_empty(len(ids_N), own_vH.shape[1])
        for part, size in _slices(ids_N, _rows_of(own_vH.shape[1])):
            ids_n = _gather(ids_N[part], size, NOBODYS) - first
            is_own_n = (ids_n >= 0) & (ids_n < len(own_vH))
            states_nH = own_vH.new_zeros(len(ids_n), own_vH.shape[1])
            states_nH[is_own_n] = own_vH[ids_n[is_own_n]]
            found_NH[part] = _scatter(states_nH)[: len(ids_N[part])]
        ctx.save_for_backward(ids_N)
        ctx.weight, ctx.padding = weight_VH, padding
        return found_NH

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor | None, None]:
        """The gradient's rows, added up over the tokens of all; a mean over workers."""
        if not ctx.needs_input_grad[1]:
            return None, None, None
        (ids_N,), (grad_NH,) = ctx.saved_tensors, outer
        own_vH, first = _own(ctx.weight)
        grad_vH = torch.zeros_like(own_vH)
        for part, size in _slices(ids_N, _rows_of(own_vH.shape[1])):
            ids_n = _gather(ids_N[part], size, NOBODYS)
            states_nH = _gather(grad_NH[part], size, 0)
            is_own_n = (ids_n >= first) & (ids_n < first + len(own_vH))
            if ctx.padding is not None:
                is_own_n &= ids_n != ctx.padding
            grad_vH.index_add_(0, ids_n[is_own_n] - first, states_nH[is_own_n].to(grad_vH.dtype))
        return None, _as_gradient(grad_vH, ctx.weight), None


class DividedHeadLoss(torch.autograd.Function):
    """``head.HeadLoss`` of a divided head, divided by ``among``.

    A worker's logits are those of its rows for the tokens of all; of each token the workers add up
    the exponentials and the label's logit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_NH: Tensor,
        weight_VH: "DTensor",
        labels_N: Tensor,
        among: Tensor,
        logits_at_once: int,
        learns: bool,
    ) -> Tensor:
        """Args: hidden states, the head, int64 labels, what the sum is divided by, logits that are
        held at once, whether gradients are wanted; a scalar."""
        kind, device = h_NH.dtype, h_NH.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        own_vH, first = _own(weight_VH)
        total = torch.zeros((), dtype=torch.float32, device=h_NH.device)
        wants_h, wants_weight, *_ = (learns and wanted for wanted in ctx.needs_input_grad)
        grad_NH = torch.empty_like(h_NH) if wants_h else None
        grad_vH = torch.zeros_like(own_vH) if wants_weight else None
        # Without a target of its own a worker has no loss, and must not make others' gradients nan.
        share_W = _gather((1 / among.to(torch.float32).clamp(min=1)).view(1), 1, 0.0)
        with torch.autocast(device, enabled=False):
            cast_vH = own_vH.to(kind)
            for part, size in _slices(labels_N, max(1, logits_at_once // weight_VH.shape[0])):
                h_nH = _gather(h_NH[part].to(kind), size, 0)
                labels_n1 = _gather(labels_N[part], size, NO_LOSS)[:, None]
                p_nv, losses_n = _softmax(h_nH, cast_vH, labels_n1 - first)
                own_n = losses_n.view(workers.count(), size)[workers.rank()]
                total += own_n[: len(labels_N[part])].sum()
                if not (wants_h or wants_weight):
                    continue
                is_target_n1 = labels_n1 != NO_LOSS
                p_nv *= is_target_n1 * share_W.repeat_interleave(size)[:, None]
                grad_nv = p_nv.to(kind)
                if grad_NH is not None:
                    grad_NH[part] = _scatter(grad_nv @ cast_vH)[: len(labels_N[part])]
                if grad_vH is not None and grad_vH.dtype == kind:
                    grad_vH.addmm_(grad_nv.T, h_nH)
                elif grad_vH is not None:
                    grad_vH += grad_nv.T @ h_nH
        ctx.gradients, ctx.weight = (grad_NH, grad_vH), weight_VH
        return total * share_W[workers.rank()]

    @staticmethod
    def backward(
        ctx: Any, *outer: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """Times the gradient of what the loss goes into, which is the same on every worker."""
        grad_NH, grad_vH = (None if grad is None else grad.mul_(outer[0]) for grad in ctx.gradients)
        ctx.gradients = None, None
        weight = None if grad_vH is None else _as_gradient(grad_vH, ctx.weight)
        return grad_NH, weight, None, None, None, None


def _softmax(h_nH: Tensor, own_vH: Tensor, labels_n1: Tensor) -> tuple[Tensor, Tensor]:
    """Own columns of softmax - e, e the label's unit vector; and the losses.

    Args:
        h_nH: States of all workers.
        own_vH: The head's own rows.
        labels_n1: Labels, counted from the first own row; below 0 or beyond where another worker
            has it, or there is none: what is said of the latter means nothing.
    """
    logits_nv = (h_nH @ own_vH.T).float()
    most_n = logits_nv.new_full((len(h_nH),), -torch.inf)
    if logits_nv.shape[1]:  # a worker may have no rows
        most_n = logits_nv.amax(1)
    if workers.count() > 1:
        distributed.all_reduce(most_n, distributed.ReduceOp.MAX)
    logits_nv -= most_n[:, None]
    is_own_n1 = (labels_n1 >= 0) & (labels_n1 < logits_nv.shape[1])
    row = is_own_n1.squeeze(1).nonzero().squeeze(1)
    column = labels_n1.squeeze(1)[row]
    chosen_n = logits_nv.new_zeros(len(h_nH))
    chosen_n[row] = logits_nv[row, column]
    p_nv = logits_nv.exp_()
    sums_2n = workers.total(torch.stack([p_nv.sum(1), chosen_n]))
    p_nv /= sums_2n[0, :, None]
    p_nv[row, column] -= 1
    return p_nv, sums_2n[0].log() - sums_2n[1]


def _own(weight_VH: "DTensor") -> tuple[Tensor, int]:
    """A worker's rows, and the number of the first."""
    each = -(-weight_VH.shape[0] // workers.count())
    return weight_VH.to_local(), each * workers.rank()


def _as_gradient(own_vH: Tensor, weight_VH: "DTensor") -> Tensor:
    """A sum over the tokens of all workers as a mean over workers, as FSDP's are."""
    own_vH /= workers.count()
    return _as(weight_VH, own_vH)


def _as(like_VH: "DTensor", own_vH: Tensor) -> Tensor:
    """A matrix divided as another is, of a worker's own rows."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own_vH,
        like_VH.device_mesh,
        like_VH.placements,
        run_check=False,
        shape=like_VH.shape,
        stride=like_VH.stride(),
    )


def _rows_of(hidden: int) -> int:
    """Tokens of a worker in a slice."""
    return max(1, NUMBERS // (workers.count() * hidden))


def _slices(tokens_N: Tensor, rows: int) -> Iterator[tuple[slice, int]]:
    """Slices of a worker's tokens, as many as the worker with the most has, and their lengths."""
    most = torch.tensor(len(tokens_N), device=tokens_N.device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    for first in range(0, int(most), rows):
        yield slice(first, first + rows), min(rows, int(most) - first)


def _gather(own: Tensor, size: int, filled: float) -> Tensor:
    """What all workers have, one after the other, each filled up to ``size``."""
    padded = own.new_full((size, *own.shape[1:]), filled)
    padded[: len(own)] = own
    whole = own.new_empty((workers.count() * size, *own.shape[1:]))
    all_gather(whole, padded)
    return whole


def _scatter(parts: Tensor) -> Tensor:
    """The sum over workers of what each has for all, a worker's own part of it."""
    own = parts.new_empty((len(parts) // workers.count(), *parts.shape[1:]))
    reduce_scatter(own, parts.contiguous())
    return own
