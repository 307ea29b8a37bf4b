"""A grouped product of experts that follows autocast, which transformers' own does not.

That one casts its input to the type of the weights, and trained weights are in fp32: a step under
bf16 would multiply experts in fp32, for which a GPU has no grouped kernel at all.
"""

from typing import Any

import torch
from torch import Tensor, nn

NAME = "grouped_mm_autocast"


def register() -> str:
    """Make it one of transformers' ways to run experts; returns its name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, in_autocast)
    return NAME


class _Cast:
    """A module whose tensors are read in another type; gradients go to its own."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.to(self._dtype) if isinstance(found, Tensor) else found


def in_autocast(experts: Any, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Experts' outputs [T, H], as transformers' ``grouped_mm`` computes them, in autocast's type.

    Args:
        experts: The module of a layer's fused experts.
        hidden_TH: What they read.
        index_TK: The experts of each token, int64.
        weights_TK: Their weights.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden_TH.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        experts, hidden_TH = _Cast(experts, dtype), hidden_TH.to(dtype)
    return grouped_mm_experts_forward(experts, hidden_TH, index_TK, weights_TK)
