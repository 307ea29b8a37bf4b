"""Gates of SIMoE (arXiv 2506.12597): hard concrete variables in their median form, Appendix A.1.

A gate is zero, one or between; where it stands is decided by one trained number, log phi.

This file needs torch alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.
"""

import math

import torch
from torch import Tensor

GAMMA = -0.1
"""Lower end that the concrete variable is stretched to."""
ZETA = 1.1
"""Upper end that it is stretched to."""
TEMPERATURE = 2 / 3
"""beta of the hard concrete distribution (another than the objective's)."""
_SHIFT = TEMPERATURE * math.log(-GAMMA / ZETA)
INITIAL_MEAN = math.log(0.95 / 0.05) + _SHIFT
"""1.3458...: the log phi at which P(z = 0) = 0.05; the gate is 0.959 there."""


def median(log_phi: Tensor, *, reopen: bool = False) -> Tensor:
    """The gate z in [0, 1] of each log phi, of the same shape (Eq. 6 and 7).

    s = sigmoid(log phi / beta) (zeta - gamma) + gamma, z = min(1, max(0, s)). It is exactly 0 up to
    log phi = -1.5986 and exactly 1 from 1.5986 on; there it has no gradient, but with ``reopen``
    that of s where it is 0 (a straight-through estimate; not in the paper).
    """
    s = (log_phi / TEMPERATURE).sigmoid() * (ZETA - GAMMA) + GAMMA
    if reopen:
        s = torch.where(s < 0, s - s.detach(), s)
        return s.clamp(max=1)
    return s.clamp(0, 1)


def probability_nonzero(log_phi: Tensor) -> Tensor:
    """P(z != 0) = sigmoid(log phi - beta log(-gamma / zeta)) of each gate (Eq. 8)."""
    return (log_phi - _SHIFT).sigmoid()


def draw_log_phi(
    shape: tuple[int, ...], spread: float, generator: torch.Generator | None = None
) -> Tensor:
    """Initial log phi, fp32 of ``shape``: normal around ``INITIAL_MEAN``.

    Args:
        shape: [M, I], or [M, O, I] with a gate a parameter.
        spread: Standard deviation. A gate that is clamped gets no gradient from the likelihood, so
            it stays small.
        generator: Where numbers come from; torch's own by default.
    """
    return INITIAL_MEAN + spread * torch.randn(shape, generator=generator)
