"""From a baseline's settings to the checkpoint that its training starts from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from upcycle_core.baselines.bam.write import write_bam
from upcycle_core.baselines.btx import write_btx
from upcycle_core.baselines.config import Baseline
from upcycle_core.baselines.upcycling import write_drop_upcycling, write_sparse_upcycling
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.ders.upcycle import write_ders_upcycling
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
        backbone: DUME's averaged backbone; for method ``dume``, as is
        routers: DUME's routers, layer to W [H, D].
        progress: Told of every tensor.

    Raises:
        InputError: What the methods' functions raise.
    """
    shards: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "progress": progress}
    mixture: dict[str, Any] = {"top_k": baseline.top_k, "router_seed": seed, **shards}
    match baseline.method:
        case "btx" | "bam":
            write = write_btx if baseline.method == "btx" else write_bam
            seed_expert = _given(seed_model) if baseline.seed_expert else None
            write(_given(experts), out, seed_expert=seed_expert, **mixture)
        case "dume":
            begun = (_given(experts), _given(backbone), _given(routers))
            assemble(*begun, out, top_k=baseline.top_k, **shards)
        case "sparse-upcycling":
            write_sparse_upcycling(_given(seed_model), out, copies=copies, **mixture)
        case "drop-upcycling":
            drawn = {"reinitialised": baseline.reinitialised, "seed": seed, **mixture}
            if baseline.start == "experts":
                write_drop_upcycling(_given(experts), out, copies=None, **drawn)
            else:
                write_drop_upcycling(_given(seed_model), out, copies=copies, **drawn)
        case "ders":
            assert baseline.ders is not None  # the recipe's checks let no other row through
            light = {"config": baseline.ders, "top_k": baseline.top_k, "seed": seed, **shards}
            write_ders_upcycling(_given(seed_model), out, experts=copies, **light)
        case "full-finetune":
            copy_checkpoint(_given(seed_model), out)
        case "branch-train-merge":
            raise ValueError("branch-train-merge trains nothing; evaluate its ensemble")


def _given(model: Part | None) -> Part:
    if model is None:
        raise ValueError("the method begins with a model that was not given")
    return model
