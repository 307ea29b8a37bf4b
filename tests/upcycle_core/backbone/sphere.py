"""Slow, obvious means on the sphere."""

import torch
from torch import Tensor


def arc(first: Tensor, second: Tensor, t: float) -> Tensor:
    """SLERP as written in a textbook, without thresholds."""
    cosine = (first / first.norm() * (second / second.norm())).sum()
    angle = torch.acos(cosine.clamp(-1, 1))
    return (torch.sin((1 - t) * angle) * first + torch.sin(t * angle) * second) / torch.sin(angle)


def karcher(tensors: list[Tensor], weights: list[float]) -> tuple[Tensor, Tensor]:
    """The mean on the sphere itself, by its steps in full space, and the coefficients from it."""
    units = [v.flatten() / v.norm() for v in tensors]
    mean = sum(w * u for w, u in zip(weights, units, strict=True))
    for _ in range(300):
        mean = mean / mean.norm()
        angles = [torch.acos((u @ mean).clamp(-1, 1)) for u in units]
        step = sum(
            w * a / a.sin() * (u - a.cos() * mean)
            for w, a, u in zip(weights, angles, units, strict=True)
        )
        mean = mean * step.norm().cos() + step * torch.sinc(step.norm() / torch.pi)
        if step.norm() < 1e-15:
            break
    total = sum(w * a / a.tan() for w, a in zip(weights, angles, strict=True))
    parts = zip(weights, angles, tensors, strict=True)
    return mean, sum(w * a / a.sin() / total * v for w, a, v in parts)
