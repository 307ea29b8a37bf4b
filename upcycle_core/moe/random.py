"""Routers that know nothing: where training starts, and the row that every table needs."""

import torch


def random_routers(
    layers: int, hidden_size: int, experts: int, *, std: float = 0.02, seed: int
) -> dict[int, torch.Tensor]:
    """Draw a router for every layer.

    Args:
        layers: L.
        hidden_size: H.
        experts: D.
        std: Standard deviation of the weights. At k=1 it does not change who is chosen.
        seed: Decides the weights.

    Returns:
        {layer: W [H, D] fp32, normal}.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: std * torch.randn(hidden_size, experts, generator=generator)
        for layer in range(layers)
    }
