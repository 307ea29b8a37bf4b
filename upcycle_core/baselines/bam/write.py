"""Make a BAM of dense models (Zhang et al., arXiv 2408.08274).

H hidden size, D experts.
"""

import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from upcycle_core.architectures.families import FAMILIES, MIXTRAL
from upcycle_core.backbone.write import Plan, write_model
from upcycle_core.baselines.bam import modeling_bam
from upcycle_core.checkpoints.writer import sync_directory, sync_file
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.moe.plan import Parts, moe_plan
from upcycle_core.moe.random import random_routers
from upcycle_core.progress import Progress

ARCHITECTURE = {
    "architectures": ["BamForCausalLM"],
    "model_type": "bam",
    "auto_map": {
        "AutoConfig": "modeling_bam.BamConfig",
        "AutoModel": "modeling_bam.BamModel",
        "AutoModelForCausalLM": "modeling_bam.BamForCausalLM",
    },
}
"""What config.json says of the classes."""
_PROJECTION = re.compile(r"(model\.layers\.(\d+)\.self_attn)\.(q_proj|o_proj)\.weight")


def write_bam(
    experts: Mapping[str, Path],
    out: Path,
    *,
    top_k: int,
    router_seed: int,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write the model that BAM's training starts from.

    FFNs are experts as in BTX. So are each dense model's query and output projections, under
    y = sum_i softmax(W_a x)_i O_i attention(Q_i x, K x, V x) over all of them; keys, values and
    everything else are the mean. Both kinds of routers are random, N(0, 0.02^2).

    Args:
        out: The directory that is written, with the code of the architecture.
        top_k: FFN experts a token passes through; it passes through all attention experts.
        router_seed: Decides the routers; those of the FFNs are BTX's of the same seed.
        experts, max_shard_bytes, progress: As for ``write_mixture``.

    Raises:
        InputError: A family whose attention is not Mixtral's; k > D, experts that do not fit
            together.
    """
    parts = Parts.open(experts, None)
    count = len(parts.experts)
    raise_faults([*_family_faults(parts), *parts.faults()])
    config = parts.family.target_config(parts.config, experts=count, top_k=top_k, dtype=parts.dtype)
    layers = config["num_hidden_layers"]
    drawn = random_routers(2 * layers, config["hidden_size"], count, seed=router_seed)
    attention_routers = {layer: drawn[layers + layer] for layer in range(layers)}
    plan = _bam_plan(parts, {layer: drawn[layer] for layer in range(layers)}, attention_routers)
    write_model(
        out,
        plan,
        config | ARCHITECTURE,
        source=parts.shared[0],
        max_shard_bytes=max_shard_bytes,
        what="assembly",
        progress=progress,
    )
    code = Path(modeling_bam.__file__)
    shutil.copyfile(code, out / code.name)
    sync_file(out / code.name)
    sync_directory(out)


def _bam_plan(
    parts: Parts,
    routers: Mapping[int, torch.Tensor],
    attention_routers: Mapping[int, torch.Tensor],
) -> Plan:
    """The Mixtral's plan, with experts in the place of query and output projections."""
    plan: Plan = {}
    for name, entry in moe_plan(parts, routers).items():
        match = _PROJECTION.fullmatch(name)
        if match is None:
            plan[name] = entry
            continue
        attention, layer, projection = match[1], int(match[2]), match[3]
        if projection == "q_proj":
            router_DH = attention_routers[layer].T
            router = router_DH.shape, parts.dtype, partial(router_DH.to, parts.dtype)
            plan[f"{attention}.router.weight"] = router
        for index, reader in enumerate(parts.experts):
            own = f"{attention}.experts.{index}.{projection}.weight"
            plan[own] = *entry[:2], partial(parts.own_values, reader, name)
    return plan


def _family_faults(parts: Parts) -> list[Fault]:
    if parts.family.target is MIXTRAL:
        return []
    supported = [name for name, family in FAMILIES.items() if family.target is MIXTRAL]
    remedy = f"BAM is built on Mixtral's attention; choose a model of {', '.join(supported)}"
    return [Fault("experts.config.model_type", parts.family.model_type, remedy)]
