"""How large a checkpoint is, from its headers alone."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from upcycle_core.architectures.dense_of import experts_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError

# FFN experts, of which a token passes through k. BAM's attention experts are not among them: every
# token passes through all of those. DeRS's are deltas; the base is everyone's.
_FFN_EXPERT = re.compile(r"model\.(decoder\.)?layers\.\d+\.(block_sparse_moe|mlp)\.experts\..+")
_DERS_EMBEDDING = "model.decoder.embed_tokens.weight"


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

    A shared expert that is only there because the architecture insists on one counts as it is. The
    places of DeRS's sparse values are no parameters; its quantised codes cannot be counted.

    Args:
        checkpoint: Dense or MoE.

    Raises:
        InputError: It cannot be read, or holds experts and does not say how many a token uses.
    """
    reader = CheckpointReader(checkpoint, integers=True)
    sizes = {
        name: math.prod(info.shape)
        for name, info in reader.tensors.items()
        if info.dtype.is_floating_point
    }
    config = reader.config.get("dense", reader.config)
    if config.get("tie_word_embeddings") and {EMBEDDING, _DERS_EMBEDDING} & set(sizes):
        sizes.pop(LM_HEAD, None)
    total = sum(size for name, size in sizes.items() if not RECOMPUTED.fullmatch(name))
    in_experts = sum(size for name, size in sizes.items() if _FFN_EXPERT.fullmatch(name))
    if not in_experts:
        return Counts(total, active=total)
    experts, top_k = experts_of(reader.config)
    if not experts or not top_k:
        remedy = "has experts, but config.json does not say how many, and how many a token uses"
        raise InputError(Fault("checkpoint", str(checkpoint), remedy))
    if reader.config.get("universal") == "delta":  # one more delta, which every token passes
        experts, top_k = experts + 1, top_k + 1
    return Counts(total, active=total - in_experts + in_experts * top_k // experts)


def expert_bytes(checkpoint: Path) -> int:
    """Bytes of a checkpoint's FFN experts, from its headers.

    Args:
        checkpoint: A MoE.

    Raises:
        InputError: It cannot be read.
    """
    tensors = CheckpointReader(checkpoint, integers=True).tensors
    return sum(
        math.prod(info.shape) * info.dtype.itemsize
        for name, info in tensors.items()
        if _FFN_EXPERT.fullmatch(name)
    )
