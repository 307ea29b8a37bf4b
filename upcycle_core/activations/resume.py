"""What a kill leaves of a computation that goes layer by layer: it goes on behind the last one."""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from upcycle_core.activations.stream import Passing
from upcycle_core.checkpoints.tensor_file import stream_atomically
from upcycle_core.checkpoints.writer import TensorSpec, sync_directory, write_json

RECORD = "record.json"
MADE, STATES = "made", "states"
APART_SECONDS = 60
"""Of work between two records of a text on its way, which is as large as the text is long."""
APART_TIMES = 10
"""So many times what the last record took is worked between two, at least."""


def digest_of(tensors: Iterable[Tensor | None]) -> str:
    """sha256 of token ids, masks, ..., on the CPU."""
    found = hashlib.sha256()
    for tensor in tensors:
        values = None if tensor is None else tensor.contiguous().view(torch.uint8).numpy()
        found.update(b"" if values is None else values.tobytes())
    return found.hexdigest()


class Record:
    """How many layers are done, and a fact of each, in a folder beside the files they left.

    Args:
        folder: Theirs alone.
        mark: What decides the computation, as JSON holds it: of another one nothing is known.
    """

    def __init__(self, folder: Path, mark: Mapping[str, Any]) -> None:
        self.folder = folder
        self._mark = json.loads(json.dumps(mark))

    def facts(self) -> list[Any] | None:
        """One for each layer that is done; None where nothing is recorded of this computation."""
        try:
            found = json.loads((self.folder / RECORD).read_text())
        except (OSError, ValueError):
            return None
        return found["facts"] if found["mark"] == self._mark else None

    def begin(self) -> None:
        """An empty folder, whatever was there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def keep(self, facts: list[Any]) -> None:
        """Record them; the files of these layers are on the disk."""
        partial = self.folder / f"{RECORD}.partial"
        write_json(partial, {"mark": self._mark, "facts": facts})
        partial.replace(self.folder / RECORD)
        sync_directory(self.folder)

    def remove(self) -> None:
        """Remove the files, first that which says that they are there."""
        (self.folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class LayersDone:
    """What each layer has made, and the text that the next one reads.

    A kill costs the layer at work, and those before it that took less than ``APART_SECONDS``, or
    ``APART_TIMES`` what it takes to write the text.

    Args:
        folder: Where they lie until ``remove``: a call with the same ``mark`` goes on from there.
        mark: As of ``Record``.

    Attributes:
        facts: One for each layer that is done.
    """

    def __init__(self, folder: Path, mark: Mapping[str, Any]) -> None:
        self._record = Record(folder, mark)
        known = self._record.facts()
        if known is None:
            self._record.begin()
        for half in folder.glob("*.partial"):  # as large as all that there is to be room for
            half.unlink()
        self.facts: list[Any] = known or []
        self._recorded, self._apart = time.monotonic(), float(APART_SECONDS)

    def made(self, layer: int, name: str) -> Tensor:
        """What a layer that is done has made, by its name."""
        with safe_open(self._path(layer, MADE), "pt") as file:
            return file.get_tensor(name)

    def go_on(self, texts: Mapping[str, Passing]) -> None:
        """Bring each text, by the name that it was kept under, before the next layer."""
        if not self.facts:
            return
        with safe_open(self._path(len(self.facts) - 1, STATES), "pt") as file:
            for name, text in texts.items():
                # A copy: kernels round otherwise where memory is not aligned as it was.
                text.hidden_BSH = file.get_tensor(name).clone().to(text.hidden_BSH.device)

    def keep(self, made: Mapping[str, Tensor], texts: Mapping[str, Passing], fact: Any) -> None:
        """One more layer is done.

        Args:
            made: What it has made.
            texts: What goes on to the next layer; nothing behind the last.
            fact: About it, as JSON holds it.
        """
        layer = len(self.facts)
        self._write(layer, MADE, made)
        self.facts.append(fact)
        began = time.monotonic()
        if texts and began - self._recorded < self._apart:
            return
        self._write(layer, STATES, {name: text.hidden_BSH for name, text in texts.items()})
        self._record.keep(self.facts)
        for path in set(self._record.folder.glob(f"*.{STATES}")) - {self._path(layer, STATES)}:
            path.unlink()
        self._recorded = time.monotonic()
        self._apart = max(APART_SECONDS, APART_TIMES * (self._recorded - began))

    def remove(self) -> None:
        """All is done, and lies elsewhere."""
        self._record.remove()

    def _write(self, layer: int, kind: str, tensors: Mapping[str, Tensor]) -> None:
        specs = [TensorSpec(name, tuple(x.shape), x.dtype) for name, x in tensors.items()]

        def produce(name: str) -> Tensor:
            return tensors[name].contiguous().cpu()

        stream_atomically(self._path(layer, kind), specs, produce, kind=kind, header={})

    def _path(self, layer: int, kind: str) -> Path:
        return self._record.folder / f"{layer}.{kind}"
