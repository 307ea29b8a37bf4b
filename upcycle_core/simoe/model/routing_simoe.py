"""Who decides which experts a prompt uses, and how every layer gets to know.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.

B batch, S positions, H hidden size, M experts.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .configuration_simoe import SimoeConfig

ROUTER_STD = 0.02


class Mixture(threading.local):
    """The experts' coefficients of the forward pass under way; all layers of a model share one.

    Each thread has a pass of its own: a server answers several prompts at once with one model. A
    copy of the model has none.
    """

    def __init__(self) -> None:
        # Once a thread. Not of the class: torch.compile would see its own pass set them.
        self._running = False
        self._coefficients: Tensor | None = None

    def __reduce__(self) -> tuple[type["Mixture"], tuple[()]]:
        return type(self), ()

    @contextmanager
    def using(self, coefficients: Tensor | None) -> Iterator[None]:
        """Run layers with ``coefficients`` [B, M] or [B, S, M]; None: as they were pre-trained."""
        before = self._running, self._coefficients
        self._running, self._coefficients = True, coefficients
        try:
            yield
        finally:
            self._running, self._coefficients = before

    def read(self) -> Tensor | None:
        """The coefficients that layers are to use; None: as they were pre-trained.

        Raises:
            RuntimeError: A part of the model is called by itself: no prompt has been seen.
        """
        if not self._running:
            remedy = "call the whole model, which finds the coefficients of its prompts"
            raise RuntimeError(f"a layer of SIMoE has no expert coefficients; {remedy}")
        return self._coefficients


class Recomputed:
    """Gradient checkpointing that computes a block again with the coefficients it had at first.

    Args:
        mixture: The model's.
        checkpoint: ``torch.utils.checkpoint.checkpoint`` with its settings.
    """

    def __init__(self, mixture: Mixture, checkpoint: Callable) -> None:
        self.mixture, self.checkpoint = mixture, checkpoint

    def __call__(self, block: Callable, *args: Any, **kwargs: Any) -> Any:
        coefficients = self.mixture.read()

        def again(*args: Any, **kwargs: Any) -> Any:
            with self.mixture.using(coefficients):
                return block(*args, **kwargs)

        return self.checkpoint(again, *args, **kwargs)


class SimoeRouter(nn.Module):
    """alpha = softmax(W2 gelu(W1 h)): coefficients [..., M] fp32 of a frozen state h [..., H].

    With ``config.standardise`` the state is (h - ``state_mean``) / ``state_deviation``: what all
    prompts have in common is most of h, and tells the router nothing.
    """

    state_mean: Tensor
    state_deviation: Tensor

    def __init__(self, config: SimoeConfig) -> None:
        super().__init__()
        width = config.router_hidden_size or config.hidden_size
        self.hidden = nn.Linear(config.hidden_size, width)
        self.output = nn.Linear(width, config.num_simoe_experts)
        for layer in (self.hidden, self.output):
            nn.init.normal_(layer.weight, std=ROUTER_STD)
            nn.init.zeros_(layer.bias)
        self.standardises = config.standardise
        if config.standardise:
            self.register_buffer("state_mean", torch.zeros(config.hidden_size))
            self.register_buffer("state_deviation", torch.ones(config.hidden_size))

    def forward(self, state_H: Tensor) -> Tensor:
        if self.standardises:
            state_H = (state_H.float() - self.state_mean) / self.state_deviation
        state_H = state_H.to(self.hidden.weight.dtype)
        logits_M = self.output(nn.functional.gelu(self.hidden(state_H)))
        return logits_M.softmax(dim=-1, dtype=torch.float32)


class SimoeTaskRouter(nn.Module):
    """Coefficients [B, M] fp32 of tasks [B], which are numbers in ``config.tasks``.

    -1 is a task that there was not in training; it gets the mean of all tasks' coefficients.
    """

    def __init__(self, config: SimoeConfig) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(len(config.tasks), config.num_simoe_experts))
        nn.init.normal_(self.logits, std=ROUTER_STD)

    def forward(self, tasks_B: Tensor) -> Tensor:
        known_TM = self.logits.softmax(dim=-1, dtype=torch.float32)
        all_TM = torch.cat((known_TM, known_TM.mean(dim=0, keepdim=True)))
        return all_TM[tasks_B]  # -1 is the last row


def last_prompt_positions(
    attention_BS: Tensor, labels_BS: Tensor | None, prompt_lengths_B: Tensor | None
) -> Tensor:
    """Position of each row's last prompt token, [B] int64.

    The prompt is every attended token before the first label that is not -100, or the first
    ``prompt_lengths`` attended tokens, or all of them; at least the first.

    Args:
        attention_BS: Which positions hold tokens.
        labels_BS: As the loss takes them, or None.
        prompt_lengths_B: Tokens of each prompt, or None; it goes before labels.
    """
    attended_BS = attention_BS.bool()
    rank_BS = attended_BS.long().cumsum(dim=1)
    prompt_BS = attended_BS
    if prompt_lengths_B is not None:
        prompt_BS = prompt_BS & (rank_BS <= prompt_lengths_B[:, None])
    elif labels_BS is not None:
        prompt_BS = prompt_BS & ((labels_BS != -100).long().cumsum(dim=1) == 0)
    prompt_BS = prompt_BS | (attended_BS & (rank_BS == 1))
    positions_S = torch.arange(attention_BS.shape[1], device=attention_BS.device)
    return torch.where(prompt_BS, positions_S, 0).amax(dim=1)


def states_at(positions_B: Tensor, state_BSH: Tensor) -> Tensor:
    """The state [B, H] of each row's position; states may lie on another device than prompts."""
    places_B1H = positions_B.to(state_BSH.device).view(-1, 1, 1).expand(-1, 1, state_BSH.shape[-1])
    return state_BSH.gather(1, places_B1H).squeeze(1)


def positions_of(attention_BS: Tensor) -> Tensor:
    """Number of each token among the attended ones, [B, S] int64 from 0."""
    return (attention_BS.long().cumsum(dim=-1) - 1).clamp(min=0)


def is_filled(past_key_values: Any) -> bool:
    """Whether a cache holds tokens of an earlier pass."""
    return past_key_values is not None and past_key_values.get_seq_length() > 0


def no_coefficients(what: str) -> ValueError:
    """The error of a pass that goes on where another one stopped, without its coefficients."""
    remedy = "give those of the pass that made it (its output has them)"
    return ValueError(f"coefficients = None: {what} was computed with some; {remedy}")
