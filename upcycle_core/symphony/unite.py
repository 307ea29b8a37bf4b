"""A dense model lifted to the union's vocabulary, and the tokens that two models share."""

from pathlib import Path

import torch
from torch import Tensor

from upcycle_core.architectures.compare import tensor_faults
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.backbone.average import write_generation_config
from upcycle_core.backbone.vocabulary import Union
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.checkpoints.writer import TensorSpec, write_json, write_sharded
from upcycle_core.errors import raise_faults
from upcycle_core.progress import Progress, Silent
from upcycle_core.symphony.merge import agreement_faults, weights_type


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
        max_shard_bytes: Size of one safetensors file.
        progress: Hears of every tensor.

    Raises:
        InputError: Model and backbone do not fit together, or only one of them is tied.
    """
    progress = progress or Silent()
    own = CheckpointReader(model, field="model")
    shared = CheckpointReader(backbone, field="backbone")
    family = family_of(shared.config, field="backbone.config.model_type")
    faults = tensor_faults(shared, family, shared.field, ffn=False)
    raise_faults(faults + agreement_faults(own, shared))
    shapes = family.tensors(shared.config)
    specs = [TensorSpec(name, shape, weights_type(own)) for name, shape in shapes.items()]
    progress.start("lifting to the union's vocabulary", len(specs), "tensors")

    def produce(name: str) -> Tensor:
        progress.advance()
        return (shared if name in (EMBEDDING, LM_HEAD) else own).tensor(name)

    write_sharded(out, specs, produce, max_shard_bytes=max_shard_bytes)
    write_json(out / "config.json", shared.config)
    copy_tokenizer(backbone, out)
    write_generation_config(shared, out)


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
