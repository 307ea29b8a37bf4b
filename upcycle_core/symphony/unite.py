"""A dense model lifted to the union's vocabulary, and the tokens that two models share."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.architectures.headers import tensor_faults
from upcycle_core.backbone.vocabulary import Union
from upcycle_core.backbone.write import Plan, type_faults, weights_type, write_model
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import raise_faults
from upcycle_core.progress import Progress
from upcycle_core.symphony.merge import agreement_faults


def write_united(
    model: Path,
    backbone: Path,
    out: Path,
    *,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write a dense model with the embeddings and lm_head of the merged backbone.

    Attention, norms and FFNs stay the model's own. Models of different vocabularies so become
    checkpoints of one, which ``assemble`` and every rival take as experts. The mean of N of them
    has the backbone's rows: to the bit where N is 2 or 4, or weights have less than 24 bits; else
    to the last bit of fp32.

    Args:
        model: A dense checkpoint with a vocabulary of its own.
        backbone: What ``write_merged_backbone`` wrote of it and others.
        out: The directory that is written: weights; the backbone's config.json, tokenizer and
            generation configuration.
        max_shard_bytes, progress: As for ``write_model``.

    Raises:
        InputError: Model and backbone do not fit together, or only one of them is tied.
    """
    own = CheckpointReader(model, field="model")
    shared = CheckpointReader(backbone, field="backbone")
    family = family_of(shared.config, field="backbone.config.model_type")
    faults = tensor_faults(shared, family, shared.field, ffn=False)
    raise_faults([*faults, *agreement_faults(own, shared), *type_faults(own, shared)])
    dtype = weights_type(shared)
    plan: Plan = {}
    for name, shape in family.tensors(shared.config).items():
        reader = shared if name in (EMBEDDING, LM_HEAD) else own
        plan[name] = shape, dtype, partial(_read, reader, name, dtype)
    write_model(
        out,
        plan,
        shared.config,
        source=shared,
        max_shard_bytes=max_shard_bytes,
        what="lifting to the union's vocabulary",
        progress=progress,
    )


def _read(reader: CheckpointReader, name: str, dtype: torch.dtype) -> Tensor:
    return reader.tensor(name).to(dtype)


def shared_tokens(union: Union, first: int, second: int) -> tuple[Tensor, Tensor]:
    """Ids of the tokens that two models share, paired.

    Args:
        union: Of the models' vocabularies.
        first: Index of a model.
        second: Index of another.

    Returns:
        Ids in the first's and in the second's vocabulary, [T] int64 each, in the union's order.
    """
    both = torch.stack([union.rows[first], union.rows[second]])
    ours, theirs = both[:, (both >= 0).all(dim=0)]
    return ours, theirs
