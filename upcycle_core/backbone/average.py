"""Merge models tensor by tensor: the backbone that experts share, and the averaged model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.architectures.headers import tensor_faults
from upcycle_core.backbone.config import MergeConfig
from upcycle_core.backbone.counts import row_weights, weighted_pieces
from upcycle_core.backbone.write import Plan, common_config, common_type, write_model
from upcycle_core.checkpoints.reader import CheckpointReader, chunks
from upcycle_core.checkpoints.writer import Produced
from upcycle_core.errors import raise_faults


def averaged_pieces(readers: Sequence[CheckpointReader], name: str) -> Iterator[torch.Tensor]:
    """Yield the mean of one tensor over checkpoints, in flat pieces of at most ``CHUNK`` values.

    Summed in fp32 in the order given, divided, cast back: (1/D) sum_d theta_d. Nothing of the
    tensor's size is held.

    Args:
        readers: The checkpoints; at least one.
        name: A tensor that all of them hold, of one shape.

    Yields:
        Of the mean, in the narrowest type that holds all of theirs.
    """
    sources, dtype = [reader.tensor(name) for reader in readers], common_type(readers)
    for parts in zip(*(chunks(source) for source in sources), strict=True):
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        yield total.div_(len(parts)).to(dtype)


def average_tensors(readers: Sequence[CheckpointReader], name: str) -> torch.Tensor:
    """Return what ``averaged_pieces`` yields, as one tensor of the same shape."""
    result = torch.empty(readers[0].tensor(name).shape, dtype=common_type(readers))
    for place, piece in zip(chunks(result), averaged_pieces(readers, name), strict=True):
        place.copy_(piece)
    return result


def write_backbone(
    readers: Sequence[CheckpointReader],
    out: Path,
    *,
    max_shard_bytes: int,
    merge: MergeConfig | None = None,
    counts: Sequence[torch.Tensor] = (),
    head: torch.Tensor | None = None,
) -> None:
    """Merge everything that is not an FFN; configuration and tokenizer are the first's.

    Args:
        readers: Experts of one architecture, in the order that they are summed.
        out: The directory that is written: config.json, weights without FFNs, tokenizer.
        max_shard_bytes: Size of one safetensors file.
        merge: How; everything is averaged by default.
        counts: Of each reader's domain the tokens [V], where ``merge`` weighs by them.
        head: A head [V, H] in place of a merged one; a tied model is untied.

    Raises:
        InputError: A tensor is missing, misshapen or has no place.
    """
    how = merge or MergeConfig()
    weighed = {EMBEDDING: how.embeddings, LM_HEAD: how.head}
    names = [name for name, way in weighed.items() if way == "counts"]
    weights = dict.fromkeys(names, row_weights(counts)) if names else {}
    _write(readers, out, max_shard_bytes=max_shard_bytes, ffn=False, weights=weights, head=head)


def write_average(readers: Sequence[CheckpointReader], out: Path, *, max_shard_bytes: int) -> None:
    """Average every tensor, as ``write_backbone`` does some: the model-averaging baseline."""
    _write(readers, out, max_shard_bytes=max_shard_bytes, ffn=True, weights={})


def _write(
    readers: Sequence[CheckpointReader],
    out: Path,
    *,
    max_shard_bytes: int,
    ffn: bool,
    weights: Mapping[str, torch.Tensor],
    head: torch.Tensor | None = None,
) -> None:
    """Write the mean; ``weights`` [D, V] are of matrices whose rows are weighed apart."""
    first = readers[0]
    family = family_of(first.config)
    config = common_config(readers)
    if head is not None:
        config = {**config, "tie_word_embeddings": False}
    raise_faults(
        fault
        for reader in readers
        for fault in tensor_faults(reader, family, reader.field, config=first.config)
    )
    plan: Plan = {}
    dtype = common_type(readers)
    for name, shape in family.tensors(config, ffn=ffn).items():
        source: Callable[[], Produced] = partial(averaged_pieces, readers, name)
        if name in weights:
            source = partial(weighted_pieces, readers, name, weights[name])
        if head is not None and name == LM_HEAD:
            source = partial(head.to, dtype)
        plan[name] = shape, dtype, source
    write_model(out, plan, config, source=first, max_shard_bytes=max_shard_bytes)
