"""Statistics without a model: features are given, their sums are written to a file."""

from pathlib import Path

import torch
from torch import Tensor

from upcycle_core.activations.moments import Moments
from upcycle_core.dume.collect import Layout
from upcycle_core.dume.statistics import Statistics, save_statistics


def write_statistics(path: Path, folds_TH: list[Tensor], *, layers: int = 1) -> Statistics:
    """A statistics file with the features of each fold; layer l counts (l + 1) times them."""
    size = folds_TH[0].shape[1]
    layout = Layout(size, tuple(range(layers)), len(folds_TH))
    moments = {layer: Moments(size, cells=len(folds_TH)) for layer in range(layers)}
    for layer, of_layer in moments.items():
        for fold, x_TH in enumerate(folds_TH):
            of_layer.update((layer + 1) * x_TH, cell=fold)
    save_statistics(path, layout, moments)
    return Statistics.load(path)


def random_domains(
    domains: int = 3, folds: int = 4, tokens: int = 40, size: int = 10, seed: int = 0
) -> dict[str, list[Tensor]]:
    """Features [T, H] fp64 by domain and fold: a direction of its own each, and noise."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        f"domain{d}": [own_H + noise(tokens + fold, size) for fold in range(folds)]
        for d, own_H in enumerate(noise(domains, size))
    }


def statistics_of(
    tmp_path: Path, features: dict[str, list[Tensor]], *, layers: int = 1
) -> dict[str, Statistics]:
    """One statistics file a domain."""
    return {
        name: write_statistics(tmp_path / f"{name}.safetensors", folds, layers=layers)
        for name, folds in features.items()
    }


def stacked(features: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
    """All features X [T, H] and one-hot targets Y [T, D], in the order of the domains."""
    parts = [torch.cat(folds) for folds in features.values()]
    labels = torch.cat([torch.full((len(part),), d) for d, part in enumerate(parts)])
    return torch.cat(parts), torch.nn.functional.one_hot(labels, len(parts)).double()
