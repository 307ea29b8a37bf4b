"""How large a checkpoint is, from its headers alone."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError

# FFN experts, of which a token passes through k. BAM's attention experts are not among them: every
# token passes through all of those.
_FFN_EXPERT = re.compile(r"model\.layers\.\d+\.(block_sparse_moe|mlp)\.experts\..+")


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters.

    Args:
        total: All of them; an embedding that is also the head counts once.
        active: Those that one token passes through: k of D experts, and everything else.
    """

    total: int
    active: int


def parameter_counts(checkpoint: Path) -> Counts:
    """Count a checkpoint's parameters; no weight is read.

    A shared expert that is only there because the architecture insists on one counts as it is.

    Args:
        checkpoint: Dense or MoE.

    Raises:
        InputError: It cannot be read, or holds experts and does not say how many a token uses.
    """
    reader = CheckpointReader(checkpoint)
    sizes = {name: math.prod(info.shape) for name, info in reader.tensors.items()}
    if reader.config.get("tie_word_embeddings") and EMBEDDING in sizes:
        sizes.pop(LM_HEAD, None)
    total = sum(size for name, size in sizes.items() if not RECOMPUTED.fullmatch(name))
    in_experts = sum(size for name, size in sizes.items() if _FFN_EXPERT.fullmatch(name))
    if not in_experts:
        return Counts(total, active=total)
    experts = reader.config.get("num_local_experts") or reader.config.get("num_experts")
    top_k = reader.config.get("num_experts_per_tok")
    if not experts or not top_k:
        remedy = "has experts, but config.json does not say how many, and how many a token uses"
        raise InputError(Fault("checkpoint", str(checkpoint), remedy))
    return Counts(total, active=total - in_experts + in_experts * top_k // experts)
