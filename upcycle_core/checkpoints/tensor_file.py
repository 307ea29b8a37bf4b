"""A safetensors file of our own kind: statistics, routers, cross-moments, alignments."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from upcycle_core.checkpoints.writer import TensorSpec, sync_directory, sync_file, write_file
from upcycle_core.errors import Fault, InputError


def save_atomically(
    path: Path, tensors: Mapping[str, Tensor], *, kind: str, header: Mapping[str, object]
) -> None:
    """Write a safetensors file, whole or not at all; equal content gives equal bytes.

    Args:
        path: Where it appears when it is complete and on the disk.
        tensors: On the CPU.
        kind: What the file is; the one metadata key, since several have no fixed order.
        header: JSON content of that key.
    """
    metadata = {kind: json.dumps(header, sort_keys=True)}
    with _appearing(path) as partial:
        save_file(dict(tensors), partial, metadata=metadata)


def stream_atomically(
    path: Path,
    specs: Sequence[TensorSpec],
    produce: Callable[[str], Tensor],
    *,
    kind: str,
    header: Mapping[str, object],
) -> None:
    """Write a file like ``save_atomically``'s, asking for one tensor at a time, in this order.

    Args:
        path, kind, header: As there.
        specs: What is written.
        produce: Name to CPU tensor of the promised shape and type.
    """
    metadata = {kind: json.dumps(header, sort_keys=True)}
    with _appearing(path) as partial:
        write_file(partial, specs, produce, metadata=metadata)


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A name to write under; what lies there in the end is brought to the disk, and to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    yield partial
    # safetensors lets the owner alone read it; workers on shared storage may be others
    partial.chmod(0o644)
    sync_file(partial)
    partial.replace(path)
    sync_directory(path.parent)


def read_header(path: Path, *, kind: str) -> dict:
    """The header of a file that ``save_atomically`` wrote.

    Raises:
        InputError: the file is missing, broken, or of another kind.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(
            Fault(kind, str(path), f"cannot be read ({error}): make it again")
        ) from error
    if kind not in metadata:
        raise InputError(Fault(kind, str(path), f"holds {sorted(metadata)}: give a {kind} file"))
    return json.loads(metadata[kind])
