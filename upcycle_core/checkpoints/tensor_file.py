"""A safetensors file of our own kind: statistics, routers, cross-moments, alignments."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from upcycle_core.checkpoints.writer import sync_directory
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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(dict(tensors), partial, metadata={kind: json.dumps(header, sort_keys=True)})
    # safetensors lets the owner alone read it; workers on shared storage may be others
    partial.chmod(0o644)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
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
