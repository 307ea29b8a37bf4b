"""From a baseline's settings to the checkpoint that its training starts from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from upcycle_core.baselines.config import Baseline
from upcycle_core.baselines.mixture import copies_of, reinitialise, with_seed, write_mixture
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.moe.assemble import assemble
from upcycle_core.progress import Progress

Part = TypeVar("Part")


def write_start(
    baseline: Baseline,
    out: Path,
    *,
    copies: int,
    seed: int,
    max_shard_bytes: int,
    experts: Mapping[str, Path] | None = None,
    seed_model: Path | None = None,
    backbone: Path | None = None,
    routers: Mapping[int, torch.Tensor] | None = None,
    normalise: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write what ``baseline.method`` begins with; see the functions that this calls.

    Args:
        baseline: The settings.
        out: The directory that is written.
        copies: Experts made of one FFN, where the method copies.
        seed: Decides routers, and neurons that are drawn anew.
        max_shard_bytes: Size of one safetensors file.
        experts: Domain to its dense expert, in the order of the model's experts; for methods that
            begin with them (``Baseline.uses_experts``).
        seed_model: The model that the experts began with; for those of ``Baseline.uses_seed``.
        backbone: DUME's averaged backbone; for method ``dume``, as are the next two.
        routers: DUME's routers, layer to W [H, D].
        normalise: Whether the weights of a token's k experts sum to one.
        progress: Told of every tensor.

    Raises:
        InputError: What the methods' functions raise.
    """
    shards: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "progress": progress}
    mixture: dict[str, Any] = {"top_k": baseline.top_k, "router_seed": seed, **shards}
    match baseline.method:
        case "btx" | "bam":
            seed_expert = _given(seed_model) if baseline.seed_expert else None
            _writer(baseline.method)(with_seed(_given(experts), seed_expert), out, **mixture)
        case "dume":
            parts = (_given(experts), _given(backbone), _given(routers))
            assemble(*parts, out, top_k=baseline.top_k, normalise=normalise, **shards)
        case "sparse-upcycling":
            write_mixture(copies_of(_given(seed_model), copies), out, **mixture)
        case "drop-upcycling":
            if baseline.start == "experts":
                begun = with_seed(_given(experts), None)
            else:
                begun = copies_of(_given(seed_model), copies)
            write_mixture(begun, out, edit=reinitialise(baseline.reinitialised, seed), **mixture)
        case "ders":
            from upcycle_core.ders.upcycle import write_ders_upcycling  # likewise

            assert baseline.ders is not None  # the recipe's checks let no other row through
            light = {"config": baseline.ders, "top_k": baseline.top_k, "seed": seed, **shards}
            write_ders_upcycling(_given(seed_model), out, experts=copies, **light)
        case "full-finetune":
            copy_checkpoint(_given(seed_model), out)
        case "branch-train-merge":
            raise ValueError("branch-train-merge trains nothing; evaluate its ensemble")


def _writer(method: str) -> Callable[..., None]:
    if method == "btx":
        return write_mixture
    from upcycle_core.baselines.bam.write import write_bam  # imports models of transformers

    return write_bam


def _given(model: Part | None) -> Part:
    if model is None:
        raise ValueError("the method begins with a model that was not given")
    return model
