"""A model's directory: tensors that only pass through, configuration, tokenizer."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.checkpoints.writer import (
    Produced,
    TensorSpec,
    sync_directory,
    sync_file,
    write_json,
    write_sharded,
)
from upcycle_core.errors import Fault
from upcycle_core.progress import Progress, Silent

GENERATION_CONFIG = "generation_config.json"
Plan = dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], Produced]]]
"""Name to shape, type and source of every tensor, in the order they are written."""


def write_model(
    out: Path,
    plan: Plan,
    config: Mapping,
    *,
    source: CheckpointReader,
    max_shard_bytes: int,
    what: str = "writing",
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint.

    Args:
        out: The directory that is written: weights, config.json, tokenizer, generation
            configuration.
        plan: Its tensors.
        config: The content of its config.json.
        source: Whose tokenizer and generation configuration it gets.
        max_shard_bytes: Size of one safetensors file.
        what: How progress names this.
        progress: Hears of every tensor.

    Raises:
        InputError: ``source`` has no tokenizer.
    """
    copy_tokenizer(source.directory, out)  # first: there may be none
    write_tensors(out, plan, max_shard_bytes=max_shard_bytes, what=what, progress=progress)
    write_json(out / "config.json", config)
    write_generation_config(source, out)


def write_tensors(
    out: Path, plan: Plan, *, max_shard_bytes: int, what: str, progress: Progress | None
) -> None:
    """Write the tensors of ``plan`` one by one; ``progress`` hears of each as part of ``what``."""
    progress = progress or Silent()
    specs = [TensorSpec(name, shape, dtype) for name, (shape, dtype, _) in plan.items()]
    progress.start(what, len(specs), "tensors")

    def produce(name: str) -> Produced:
        progress.advance()
        return plan[name][2]()

    write_sharded(out, specs, produce, max_shard_bytes=max_shard_bytes)


def write_generation_config(source: CheckpointReader, out: Path) -> None:
    """Carry the generation configuration along, or write the token ids that config.json holds."""
    path = source.directory / GENERATION_CONFIG
    if path.is_file():
        shutil.copyfile(path, out / GENERATION_CONFIG)
        sync_file(out / GENERATION_CONFIG)
    else:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: source.config.get(name) for name in names}
        write_json(out / GENERATION_CONFIG, {"_from_model_config": True, **ids})
    sync_directory(out)


def weights_type(reader: CheckpointReader) -> torch.dtype:
    """Type of a checkpoint's weights."""
    return next(iter(reader.tensors.values())).dtype


def common_type(readers: Iterable[CheckpointReader]) -> torch.dtype:
    """The narrowest type that holds the weights of all of several checkpoints."""
    return reduce(torch.promote_types, map(weights_type, readers))


def common_config(readers: Sequence[CheckpointReader]) -> Mapping[str, Any]:
    """The content of the first's config.json, for weights of the type that holds all."""
    config, dtype = readers[0].config, common_type(readers)
    if dtype == weights_type(readers[0]):
        return config
    return {**config, **dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))}


def type_faults(own: CheckpointReader, shared: CheckpointReader) -> list[Fault]:
    """An expert whose weights the backbone's type cannot hold; a seed given in bf16 is as exact in
    the fp32 of trained experts."""
    given, kept = weights_type(own), weights_type(shared)
    if torch.promote_types(given, kept) == kept:
        return []
    remedy = f"weights are {given}, the backbone's {kept}, which cannot hold them; save both in "
    return [Fault(own.field, str(own.directory), f"{remedy}one type")]
