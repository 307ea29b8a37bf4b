"""Branch-Train-MiX (Sukhbaatar et al., arXiv 2403.07816): what its MoE finetuning starts from."""

from collections.abc import Mapping
from pathlib import Path

from upcycle_core.baselines.mixture import with_seed, write_mixture
from upcycle_core.progress import Progress


def write_btx(
    experts: Mapping[str, Path],
    out: Path,
    *,
    seed_expert: Path | None = None,
    top_k: int,
    router_seed: int,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write FF_MoE(x) = sum_i g_i(W_l x) FF_i(x) with g = softmax(top-k), for every layer l.

    FF_i are the experts' FFNs; everything else is the mean over all experts; W_l is random,
    N(0, 0.02^2). Branch and train, which come before, and the finetuning that makes W_l mean
    something are training's.

    Args:
        experts: Domain to its expert's checkpoint; the order is the order of the experts.
        out: The directory that is written: a stock MoE.
        seed_expert: The model that the experts began with. It becomes one more expert, the last,
            and is part of the mean.
        top_k: Experts a token passes through (the paper: 2).
        router_seed: Decides the routers.
        max_shard_bytes: Size of one safetensors file.
        progress: Hears of every tensor.

    Raises:
        InputError: Fewer than two experts, k > D, experts that do not fit together.
    """
    write_mixture(
        with_seed(experts, seed_expert),
        out,
        top_k=top_k,
        router_seed=router_seed,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
