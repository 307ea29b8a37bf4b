"""A checkpoint written anew, tensor by tensor: transformations as functions that can be chained."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.architectures.headers import tensor_faults
from upcycle_core.backbone.write import Plan, weights_type, write_model
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import raise_faults

Read = Callable[[str], Tensor]
Transform = Callable[[str, Tensor], Tensor]


def transformed(
    read: Read, transforms: Sequence[Transform], *, wide: torch.dtype = torch.float32
) -> Read:
    """``read`` followed by ``transforms``, in their order, rounded once at the end.

    Args:
        read: Name to tensor.
        transforms: Each gets the name and what the one before returned; shapes stay.
        wide: The type that they compute in, unless the tensor's own is wider.

    Returns:
        Name to the changed tensor, in the type that ``read`` gave it.
    """

    def produce(name: str) -> Tensor:
        source = read(name)
        tensor = source.to(torch.promote_types(source.dtype, wide))
        for transform in transforms:
            tensor = transform(name, tensor)
        return tensor.to(source.dtype)

    return produce


def read_untied(reader: CheckpointReader) -> Read:
    """Read tensors of ``reader`` as if lm_head were not tied to the embedding."""
    tied = LM_HEAD not in reader.tensors
    return lambda name: reader.tensor(EMBEDDING if tied and name == LM_HEAD else name)


def rewrite(
    reader: CheckpointReader,
    out: Path,
    transforms: Sequence[Transform],
    *,
    untie: bool,
    max_shard_bytes: int,
) -> None:
    """Write the model of ``reader`` with every tensor transformed; each only passes through.

    Args:
        reader: A dense checkpoint.
        out: The directory that is written: weights, config.json, tokenizer.
        transforms: As ``transformed`` takes them.
        untie: Write an lm_head of its own, as folding norms demands; else ties stay.
        max_shard_bytes: Size of one safetensors file.

    Raises:
        InputError: A tensor is missing, misshapen or has no place.
    """
    family = family_of(reader.config, field=f"{reader.field}.config.model_type")
    raise_faults(tensor_faults(reader, family, reader.field))
    config = reader.config | {"tie_word_embeddings": False} if untie else reader.config
    produce = transformed(read_untied(reader), transforms)
    plan: Plan = {
        name: (shape, weights_type(reader), partial(produce, name))
        for name, shape in family.tensors(config).items()
    }
    write_model(out, plan, config, source=reader, max_shard_bytes=max_shard_bytes)
