"""Write a checkpoint tensor by tensor: headers are known beforehand, weights only pass through."""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from upcycle_core.checkpoints.reader import FLOAT_DTYPES, INDEX_FILE, INTEGER_DTYPES, SINGLE_FILE
from upcycle_core.durable import reserve, sync

DTYPE_NAMES = {dtype: name for name, dtype in (FLOAT_DTYPES | INTEGER_DTYPES).items()}
# The safetensors format aligns the first tensor by padding the header with spaces.
ALIGNMENT = 8
SHARDS = "model-*-of-*.safetensors"
PIECE = 4 * 2**20
"""Bytes of one call that writes: the kernel takes twice as long over each of a larger one's."""
PYTORCH: Mapping[str, str] = {"format": "pt"}
"""What transformers asks of a header."""


Produced = torch.Tensor | Iterator[torch.Tensor]
"""A tensor; or pieces of it, together its values in order, where the whole would be too large."""
Produce = Callable[[str], Produced]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that is to be written.

    Args:
        name: Its name in the checkpoint.
        shape: Its sizes.
        dtype: Its type, floating point or integer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_sharded(
    directory: Path,
    specs: Sequence[TensorSpec],
    produce: Produce,
    *,
    max_shard_bytes: int,
) -> None:
    """Write ``specs`` in the order given, asking ``produce`` for one tensor at a time.

    One shard is ``model.safetensors``; several are ``model-0000i-of-0000N.safetensors`` with an
    index. What an earlier write left of another number is removed. The bytes depend on names,
    shapes and values alone. Every file is on the disk (fsync) before this returns.

    Args:
        directory: Where the files go; made if it is not there.
        specs: All tensors; a shard is filled until the next one does not fit.
        produce: Name to CPU tensor of the promised shape and dtype, or to its values in pieces, in
            order. Each is released when written.
        max_shard_bytes: Data bytes of one file; a larger tensor has a file of its own.

    Raises:
        ValueError: ``produce`` broke its promise, or a name comes twice.
    """
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("a tensor name comes twice among the specs")
    directory.mkdir(parents=True, exist_ok=True)
    shards = _plan(specs, max_shard_bytes)
    names = _shard_names(len(shards))
    with ThreadPoolExecutor(1) as disk:  # gets one file while the next is written
        synced: list[Future[None]] = []
        for file, shard in zip(names, shards, strict=True):
            _fill(directory / file, shard, produce, PYTORCH)
            _await(synced)
            synced.append(disk.submit(sync, directory / file))
        _await(synced)
    earlier = {SINGLE_FILE, INDEX_FILE, *(path.name for path in directory.glob(SHARDS))}
    for file in earlier - set(names):
        (directory / file).unlink(missing_ok=True)
    if len(shards) > 1:
        pairs = zip(names, shards, strict=True)
        weight_map = {spec.name: file for file, shard in pairs for spec in shard}
        metadata = {
            "total_parameters": sum(torch.Size(spec.shape).numel() for spec in specs),
            "total_size": sum(spec.nbytes for spec in specs),
        }
        write_json(directory / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})
    sync_directory(directory)


def write_json(path: Path, content: object) -> None:
    """Write ``content`` as indented JSON with sorted keys; it is on the disk when this returns."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8; it is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(text.encode("utf-8"))
        _sync(file)


def sync_file(path: Path) -> None:
    """Bring a file that is already written to the disk."""
    sync(path)


def sync_directory(directory: Path) -> None:
    """Bring the names of the files in ``directory`` to the disk, where that can be asked."""
    sync(directory)


def _await(synced: list[Future[None]]) -> None:
    while synced:
        synced.pop().result()


def _plan(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _header(shard: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in shard:
        end = offset + spec.nbytes
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_file(
    path: Path,
    shard: Sequence[TensorSpec],
    produce: Produce,
    *,
    metadata: Mapping[str, str] = PYTORCH,
) -> None:
    """Write one safetensors file, asking for one tensor at a time; see ``write_sharded``.

    Args:
        path: The file; it is on the disk when this returns.
        shard: Its tensors, in the order in which they are written.
        produce: As for ``write_sharded``.
        metadata: Strings in its header.

    Raises:
        ValueError: ``produce`` broke its promise.
    """
    _fill(path, shard, produce, metadata)
    sync(path)


def _fill(
    path: Path, shard: Sequence[TensorSpec], produce: Produce, metadata: Mapping[str, str]
) -> None:
    """Write one file, and leave it to the kernel when it comes to the disk."""
    header = _header(shard, metadata)
    with path.open("wb", buffering=0) as file:
        reserve(file, len(header) + sum(spec.nbytes for spec in shard))
        _write_all(file, header)
        for spec in shard:
            _write_tensor(file, spec, produce(spec.name))


def _write_tensor(file: BinaryIO, spec: TensorSpec, made: Produced) -> None:
    """Write a tensor, or its pieces one after the other, if they are what was promised."""
    if isinstance(made, torch.Tensor):
        _check(spec, tuple(made.shape), made.dtype)
        _write_values(file, made)
        return
    count, promised = 0, torch.Size(spec.shape).numel()
    for piece in made:
        count += piece.numel()
        if piece.dtype != spec.dtype or count > promised:
            _check(spec, (count,), piece.dtype)
        _write_values(file, piece)
        del piece
    if count != promised:
        _check(spec, (count,), spec.dtype)


def _check(spec: TensorSpec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if (shape, dtype) != (spec.shape, spec.dtype):
        raise ValueError(
            f"{spec.name}: {shape} {dtype} was produced where "
            f"{spec.shape} {spec.dtype} was promised"
        )


def _write_values(file: BinaryIO, values: torch.Tensor) -> None:
    flat = values.detach().reshape(-1)  # contiguous, copied if need be
    _write_all(file, flat.view(torch.uint8).numpy().data)


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of ``data``: one call of an unbuffered file may write a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest[:PIECE]) :]


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
