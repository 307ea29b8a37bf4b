"""The output head and its cross-entropy, a slice of tokens at a time: logits are never whole.

T tokens that are predicted, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from upcycle_core.architectures.dense_of import TARGETS
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.training import vocabulary
from upcycle_core.training.rows import NO_LOSS
from upcycle_core.training.vocabulary import DividedHeadLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLICE = 1 << 24
"""Logits that are held at once."""


class HeadLoss(torch.autograd.Function):
    """Sum over tokens of -log softmax(W h)[label]; both gradients are made on the way forward.

    With p the softmax and e the label's unit vector, the gradient of W h is p - e: of h it is
    W^T (p - e), and of W the sum of (p - e) h^T. Made slice by slice, neither logits nor their
    gradient [T, V] are kept for the way back.
    """

    @staticmethod
    def forward(
        ctx: Any, h_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, learns: bool
    ) -> Tensor:
        """Args: hidden states, the head, int64 labels, whether gradients are wanted; a scalar."""
        kind, device = h_TH.dtype, h_TH.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        total = torch.zeros((), dtype=torch.float32, device=h_TH.device)
        wants_h, wants_weight, *_ = (learns and wanted for wanted in ctx.needs_input_grad)
        grad_TH = torch.empty_like(h_TH) if wants_h else None
        grad_VH = torch.zeros_like(weight_VH) if wants_weight else None
        with torch.autocast(device, enabled=False):
            cast_VH = weight_VH.to(kind)
            rows = max(1, SLICE // len(weight_VH))
            for first in range(0, len(h_TH), rows):
                part = slice(first, first + rows)
                h_tH, labels_t = h_TH[part].to(kind), labels_T[part, None]
                log_p_tV = (h_tH @ cast_VH.T).float().log_softmax(1)
                losses_t1 = -log_p_tV.gather(1, labels_t)
                total += losses_t1.sum()
                if not (wants_h or wants_weight):
                    continue
                grad_tV = log_p_tV.exp_()
                grad_tV.scatter_add_(1, labels_t, -torch.ones_like(losses_t1))
                grad_tV = grad_tV.to(kind)
                if grad_TH is not None:
                    grad_TH[part] = grad_tV @ cast_VH
                if grad_VH is not None and grad_VH.dtype == kind:
                    grad_VH.addmm_(grad_tV.T, h_tH)
                elif grad_VH is not None:
                    grad_VH += grad_tV.T @ h_tH
        ctx.gradients = grad_TH, grad_VH
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Times the gradient of what the sum goes into."""
        grad_TH, grad_VH = (None if grad is None else grad.mul_(outer[0]) for grad in ctx.gradients)
        ctx.gradients = None, None
        return grad_TH, grad_VH, None, None


@contextmanager
def sliced_head(network: "PreTrainedModel") -> Iterator[None]:
    """Inside, ``network(..., labels=...)`` has the loss it always has, and no logits.

    Where it is not known of the network that its logits are one matrix times its last hidden state,
    nothing changes. Tokens that are not predicted cost nothing.

    Args:
        network: Changed in place, and back again; its parameters keep their names.
    """
    head: Any = network.get_output_embeddings()
    asked: Any = _asked_for_loss(network)
    if not (_is_known(asked) and type(head) is nn.Linear and head.bias is None):
        yield
        return
    head.forward = _hand_on
    asked.loss_function = partial(_loss, head)
    try:
        yield
    finally:
        del head.forward
        del asked._loss_function
        vocabulary.undo(network)


def is_sliced(network: "PreTrainedModel") -> bool:
    """Whether ``network`` is within ``sliced_head``, and has a head that it slices."""
    return isinstance(getattr(_asked_for_loss(network), "_loss_function", None), partial)


def _hand_on(hidden: Tensor) -> Tensor:
    """What a head does meanwhile: the loss multiplies."""
    return hidden.clone()  # FSDP2 warns of views of what another module returned


def _asked_for_loss(network: "PreTrainedModel") -> "PreTrainedModel":
    """What computes the loss: the network itself, or the dense model that a SIMoE holds."""
    return network.model if network.config.model_type == "simoe" else network


def _is_known(network: "PreTrainedModel") -> bool:
    if network.config.model_type == "ders":
        return True
    known = network.config.model_type in FAMILIES or network.config.model_type in TARGETS
    return known and type(network).__module__.startswith("transformers.")


def _loss(
    head: nn.Linear,
    logits: Tensor,
    labels: Tensor,
    *_: object,  # some pass the vocabulary's size by its place
    num_items_in_batch: Tensor | int | None = None,
    **__: object,
) -> Tensor:
    """What transformers' loss of causal language models is, from the head's input.

    Args:
        head: Its weight [V, H] is another tensor at every step where workers divide it.
        logits: What the head handed on, [B, S, H].
        labels: [B, S] int64, ``NO_LOSS`` where nothing is predicted.
        num_items_in_batch: What the sum is divided by; the tokens predicted by default.
    """
    following_BS = labels[:, 1:]
    is_target_BS = following_BS != NO_LOSS
    h_TH = logits[:, :-1][is_target_BS]
    targets, learns = following_BS[is_target_BS], torch.is_grad_enabled()
    among = len(targets) if num_items_in_batch is None else num_items_in_batch
    if hasattr(head.weight, "device_mesh"):  # workers keep its rows apart
        divisor = torch.as_tensor(among, device=h_TH.device)
        return cast(
            Tensor, DividedHeadLoss.apply(h_TH, head.weight, targets, divisor, SLICE, learns)
        )
    return cast(Tensor, HeadLoss.apply(h_TH, head.weight, targets, learns)) / among
