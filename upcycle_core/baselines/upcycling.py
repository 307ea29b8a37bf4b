"""Sparse upcycling and Drop-Upcycling: experts that are copies of one FFN, whole or partly new.

H hidden size, I intermediate size, N copies.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from upcycle_core.baselines.mixture import with_seed, write_mixture
from upcycle_core.errors import Fault, InputError
from upcycle_core.moe.plan import Edit, Part
from upcycle_core.moe.random import keyed_generator
from upcycle_core.progress import Progress


def write_sparse_upcycling(
    model: Path,
    out: Path,
    *,
    copies: int,
    top_k: int,
    router_seed: int,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write N copies of a dense model's FFNs with random routers, N(0, 0.02^2).

    Komatsuzaki et al., arXiv 2212.05055. Routers renormalise the weights of the k experts, so the
    model computes what the dense one does until training tells the copies apart.

    Args:
        model: A dense checkpoint; everything but its FFNs is taken over as it is.
        out: The directory that is written: a stock MoE.
        copies: N.
        top_k: Experts a token passes through.
        router_seed: Decides the routers.
        max_shard_bytes: Size of one safetensors file.
        progress: Hears of every tensor.

    Raises:
        InputError: Fewer than two copies, k > N, a model that is not supported.
    """
    write_mixture(
        _copies(model, copies),
        out,
        top_k=top_k,
        router_seed=router_seed,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def write_drop_upcycling(
    models: Path | Mapping[str, Path],
    out: Path,
    *,
    copies: int | None = None,
    reinitialised: float = 0.5,
    seed: int,
    top_k: int,
    router_seed: int,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write experts of which a share of the intermediate neurons is drawn anew (``reinitialise``).

    Nakamura et al., arXiv 2502.19261: N copies of one model's FFNs. Symphony-MoE's table compares
    with a variant, "reuses FFN weights and applies Gaussian perturbation to randomly selected
    parameters" with an averaged backbone: give it several dense models.

    Args:
        models: One dense checkpoint, or name to checkpoint of several.
        out: The directory that is written: a stock MoE.
        copies: N, where one checkpoint is given.
        reinitialised: r. With 0 this is sparse upcycling, byte for byte.
        seed: Decides neurons and weights.
        top_k: Experts a token passes through.
        router_seed: Decides the routers.
        max_shard_bytes: Size of one safetensors file.
        progress: Hears of every tensor.

    Raises:
        InputError: Fewer than two experts, k > N, r outside [0, 1], models that do not fit.
    """
    if isinstance(models, Mapping) and copies is not None:
        raise InputError(Fault("copies", copies, "several models are given, one expert each"))
    experts = (
        with_seed(models, None) if isinstance(models, Mapping) else _copies(models, copies or 0)
    )
    write_mixture(
        experts,
        out,
        top_k=top_k,
        router_seed=router_seed,
        max_shard_bytes=max_shard_bytes,
        edit=reinitialise(reinitialised, seed),
        progress=progress,
    )


def reinitialise(share: float, seed: int) -> Edit:
    """Make the edit of Drop-Upcycling (arXiv 2502.19261, section 3, Eqs. 5 to 8).

    For each layer and expert a set S of floor(r I) intermediate neurons is drawn. Rows S of gate
    and up and columns S of down are replaced by draws from N(mu, sigma^2), where mu and sigma are
    mean and standard deviation of the original entries at exactly these places, one pair a matrix.

    The three matrices share S, as the paper has it. The authors' published script draws a set for
    each matrix, so that it renews parts of more neurons than r says, and permutes the neurons,
    which changes nothing in what an expert computes; we do neither.

    Args:
        share: r.
        seed: Decides S and the draws, with layer, expert and matrix, whatever the order of calls.

    Raises:
        InputError: r outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise InputError(Fault("reinitialised", share, "must be from 0 to 1"))

    def edit(layer: int, expert: int, part: Part, weight: torch.Tensor) -> torch.Tensor:
        axis = 1 if part == "down" else 0
        width = weight.shape[axis]
        neurons = torch.randperm(width, generator=keyed_generator(seed, layer, expert))
        neurons = neurons[: int(share * width)]
        if not len(neurons):
            return weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        old = weight.index_select(axis, neurons).to(exact)
        sigma, mu = torch.std_mean(old, correction=0)
        generator = keyed_generator(seed, layer, expert, part)
        new = mu + sigma * torch.randn(old.shape, generator=generator, dtype=exact)
        return weight.index_copy(axis, neurons, new.to(weight.dtype))

    return edit


def _copies(model: Path, copies: int) -> dict[str, Path]:
    if copies < 2:
        raise InputError(Fault("copies", copies, "must be 2 or more"))
    return {f"copy {index}": model for index in range(copies)}
