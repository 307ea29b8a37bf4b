"""Where trained baselines start: experts, their averaged backbone, routers that know nothing.

``write_mixture`` writes all of them as a stock MoE; they differ in where experts come from.

Branch-Train-MiX (Sukhbaatar et al., arXiv 2403.07816): FF_MoE(x) = sum_i g_i(W_l x) FF_i(x) with
g = softmax(top-k), for every layer l. FF_i are the FFNs of ``with_seed``'s experts, everything else
is the mean over all of them, W_l is random. Branch and train, which come before, and the finetuning
that makes W_l mean something are training's. The paper has k = 2.

Sparse upcycling (Komatsuzaki et al., arXiv 2212.05055): ``copies_of`` one dense model. Routers
renormalise the weights of the k experts, so the model computes what the dense one does until
training tells the copies apart.

Drop-Upcycling (Nakamura et al., arXiv 2502.19261): the same with ``reinitialise`` as ``edit``; with
a share of 0 it is sparse upcycling, byte for byte. Symphony-MoE's table compares with a variant,
"reuses FFN weights and applies Gaussian perturbation to randomly selected parameters" with an
averaged backbone: that of several dense models.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from upcycle_core.architectures.families import family_of
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.plan import Edit, Part
from upcycle_core.moe.random import keyed_generator, random_routers
from upcycle_core.progress import Progress

SEED = "seed model"
"""Name of the seed among the experts; no domain has a space in its name."""


def with_seed(experts: Mapping[str, Path], seed_expert: Path | None) -> dict[str, Path]:
    """The experts, with the seed model as the last of them if there is one.

    Raises:
        InputError: There are fewer than two.
    """
    everyone = dict(experts) if seed_expert is None else {**experts, SEED: seed_expert}
    if len(everyone) < 2:
        raise InputError(Fault("experts", list(everyone), "must be two or more"))
    return everyone


def copies_of(model: Path, copies: int) -> dict[str, Path]:
    """One dense model as several experts.

    Raises:
        InputError: There are fewer than two.
    """
    if copies < 2:
        raise InputError(Fault("copies", copies, "must be 2 or more"))
    return {f"copy {index}": model for index in range(copies)}


def write_mixture(
    experts: Mapping[str, Path],
    out: Path,
    *,
    top_k: int,
    router_seed: int,
    max_shard_bytes: int,
    edit: Edit | None = None,
    progress: Progress | None = None,
) -> None:
    """Assemble experts, the mean of everything that is not an FFN, and routers of N(0, 0.02^2).

    Args:
        experts: Name to checkpoint; one checkpoint may come several times.
        router_seed: Decides the routers.
        out, top_k, max_shard_bytes, edit, progress: As for ``assemble``.

    Raises:
        InputError: As ``assemble``.
    """
    name, first = next(iter(experts.items()))
    config = CheckpointReader(first, field=f"experts.{name}").config
    full = family_of(config, field=f"experts.{name}.config.model_type").resolve(config)
    routers = random_routers(
        full["num_hidden_layers"], full["hidden_size"], len(experts), seed=router_seed
    )
    assemble(
        experts,
        None,
        routers,
        out,
        top_k=top_k,
        max_shard_bytes=max_shard_bytes,
        edit=edit,
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
