"""A text's way through a decoder, layer by layer, that a kill does not undo.

What is between two layers lies in a mapped file: the kernel keeps what fits of it and writes the
rest to the disk, and none of it is the process's own memory. When a layer is done, that is
recorded; the same call goes on behind it.

Shapes: B paragraphs a batch, S tokens a paragraph, H hidden size.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upcycle_core.activations.resume import Record, digest_of
from upcycle_core.activations.stream import LayerStream, Passing
from upcycle_core.checkpoints.writer import sync_file

ALIGNED = 4096
"""Bytes at which a batch begins: kernels round otherwise where memory is not aligned."""


@dataclass(frozen=True)
class Text:
    """A batch of a text.

    Args:
        ids_BS: Token ids, int64.
        mask_BS: 1 on tokens; None where nothing is told of padding.
    """

    ids_BS: Tensor
    mask_BS: Tensor | None = None


Through = Callable[[int], None]
"""Takes a batch, by its number, through the layer at work."""
Visit = Callable[[int, nn.Module, Through], Any]
"""Called with a layer's index, the layer with its weights, and what takes each batch through it;
returns what is to be recorded, as JSON holds it. Files that it writes are on the disk by then."""


class Walk:
    """The way of all batches through all layers.

    Args:
        stream: The decoder.
        batches: In any order, by number.
        folder: Where files lie meanwhile.
        key: What else decides the way, as JSON holds it: the files of another walk, of other texts
            or of other weights are left aside.
        needs_end: Whether what leaves the last layer is wanted.
    """

    def __init__(
        self,
        stream: LayerStream,
        batches: Sequence[Text],
        folder: Path,
        *,
        key: Any,
        needs_end: bool = True,
    ) -> None:
        self._stream, self._batches, self._folder = stream, batches, folder
        self._needs_end = needs_end
        mark = {
            "key": key,
            "batches": [list(batch.ids_BS.shape) for batch in batches],
            "texts": digest_of(x for batch in batches for x in (batch.ids_BS, batch.mask_BS)),
            "weights": stream.stamp,
            "layers": stream.layers,
            "dtype": str(stream.dtype),
        }
        self._record = Record(folder, mark)

    def go(self, visit: Visit) -> list[Any]:
        """Visit every layer that was not yet; what was recorded of each layer, in order."""
        record = self._known()
        if record is None:
            self._record.begin()
            self._start()
            record = []
            self._record.keep(record)
        for index in range(len(record), self._stream.layers):
            record.append(self._through(index, visit))
            self._record.keep(record)
            self._path(index).unlink()
        return record

    def ends(self) -> Iterator[Tensor]:
        """What each batch is behind the last layer, [B, S, H]."""
        states = self._states(self._stream.layers)
        for number in range(len(self._batches)):
            yield states[number].to(self._stream.device)

    def close(self) -> None:
        """Remove the files."""
        self._record.remove()

    def _start(self) -> None:
        states = self._states(0)
        with self._stream.embedding():
            for number, batch in enumerate(self._batches):
                states[number].copy_(self._stream.embedded(batch.ids_BS))
        sync_file(self._path(0))

    def _through(self, index: int, visit: Visit) -> Any:
        keeps = self._needs_end or index < self._stream.layers - 1
        before = self._states(index)
        after = self._states(index + 1) if keeps else None

        def through(number: int) -> None:
            batch = self._batches[number]
            mask = None if batch.mask_BS is None else batch.mask_BS.to(self._stream.device)
            passing = Passing(before[number].to(self._stream.device), mask)
            hidden_BSH = self._stream.through(passing)
            if after is not None:
                after[number].copy_(hidden_BSH)

        with self._stream.layer(index) as layer:
            fact = visit(index, layer, through)
        if keeps:
            sync_file(self._path(index + 1))
        return fact

    def _path(self, index: int) -> Path:
        """The file of what layer ``index`` reads."""
        return self._folder / f"{index}.states"

    def _states(self, index: int) -> list[Tensor]:
        """Every batch before layer ``index``, [B, S, H] each: views of one mapped file."""
        width, dtype = self._stream.model.config.hidden_size, self._stream.dtype
        step = ALIGNED // dtype.itemsize
        starts, end = [], 0
        for batch in self._batches:
            starts.append(end)
            end += -(-batch.ids_BS.numel() * width // step) * step
        self._path(index).touch()
        # Not to append: glibc refuses that where it stands in for a file system without fallocate.
        with self._path(index).open("r+b") as file:
            # A full disk is an error here; where the file is written through memory, it is a kill.
            os.posix_fallocate(file.fileno(), 0, max(end, 1) * dtype.itemsize)
        flat = torch.from_file(str(self._path(index)), shared=True, size=end, dtype=dtype)
        return [
            flat[start : start + batch.ids_BS.numel() * width].view(*batch.ids_BS.shape, width)
            for start, batch in zip(starts, self._batches, strict=True)
        ]

    def _known(self) -> list[Any] | None:
        """What an earlier call has recorded; None where it was of something else, or lost."""
        facts = self._record.facts()
        if facts is None:
            return None
        needed = len(facts) < self._stream.layers or self._needs_end
        return None if needed and not self._path(len(facts)).exists() else facts
