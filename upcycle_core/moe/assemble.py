"""Assemble the MoE: backbone, experts and routers streamed into a stock architecture's files.

H hidden size, D experts.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from upcycle_core.backbone.write import write_model
from upcycle_core.corpora.chat_end import name_chat_end
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.moe.plan import Edit, Parts, moe_plan
from upcycle_core.progress import Progress


def assemble(
    experts: Mapping[str, Path],
    backbone: Path | None,
    routers: Mapping[int, torch.Tensor],
    out: Path,
    *,
    top_k: int,
    max_shard_bytes: int,
    normalise: bool = True,
    edit: Edit | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the MoE checkpoint that a stock architecture of transformers loads.

    No tensor is held longer than it takes to write it. Weights have the type of
    what is shared, which must hold the experts' exactly.

    Args:
        experts: Domain to its expert's checkpoint; the order is the order of the experts.
        backbone: What ``write_backbone`` wrote; None for the mean of the experts, computed on the
            way, each checkpoint counted once (N copies of one model share that model's own).
        routers: Layer to W [H, D], columns in the order of ``experts``.
        out: The directory that is written: weights under per-expert names, config.json,
            generation configuration, which names the end of a chat's response, tokenizer.
        top_k: Experts a token passes through.
        max_shard_bytes, progress: As for ``write_model``.
        normalise: Whether the weights of a token's k experts sum to one; else they are the softmax
            over all experts as it is (DUME, equation 4).
        edit: Called with (layer, expert, "gate" | "up" | "down", weight) for every matrix of every
            expert; what it returns is written. Gate and up are [I, H], down is [H, I].

    Raises:
        InputError: k > D; weights that the stock architecture cannot leave as they are; experts and
            backbone that do not fit; routers missing, of another shape or not finite.
    """
    parts = Parts.open(experts, backbone)
    full = parts.family.resolve(parts.config)
    raise_faults(parts.faults() + _router_faults(full, len(parts.experts), routers))
    config = parts.family.target_config(
        parts.config,
        experts=len(parts.experts),
        top_k=top_k,
        normalise=normalise,
        dtype=parts.dtype,
    )
    write_model(
        out,
        moe_plan(parts, routers, edit),
        config,
        source=parts.shared[0],
        max_shard_bytes=max_shard_bytes,
        what="assembly",
        progress=progress,
    )
    name_chat_end(out)


def _router_faults(full: Mapping, experts: int, routers: Mapping[int, torch.Tensor]) -> list[Fault]:
    layers, shape = full["num_hidden_layers"], (full["hidden_size"], experts)
    faults = []
    if sorted(routers) != list(range(layers)):
        faults.append(Fault("routers", sorted(routers), f"must be layers 0 to {layers - 1}"))
    for layer, weight_HD in routers.items():
        if tuple(weight_HD.shape) != shape:
            remedy = f"must be {list(shape)}: hidden size, experts"
            faults.append(Fault(f"routers.{layer}", list(weight_HD.shape), remedy))
        elif not torch.isfinite(weight_HD).all():
            faults.append(Fault(f"routers.{layer}", "NaN or infinity", "solve the routers again"))
    return faults
