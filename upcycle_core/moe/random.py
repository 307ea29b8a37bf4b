"""Routers that know nothing: where training starts, and the row that every table needs."""

import hashlib

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


def keyed_generator(*key: int | str) -> torch.Generator:
    """Random numbers that depend on ``key`` alone, whatever the order of calls.

    Args:
        key: What they are for (a seed, a layer, an expert, a matrix).
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
