"""Read a checkpoint without holding it: tensors are views of memory-mapped safetensors files."""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from upcycle_core.checkpoints.known import KnownFiles
from upcycle_core.errors import Fault, InputError, raise_faults

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
INTEGER_DTYPES = {
    "U8": torch.uint8,
    "U16": torch.uint16,
    "I32": torch.int32,
    "I64": torch.int64,
}
# Checks walk a tensor in pieces of this many elements, so that they never copy a large one.
CHUNK = 1 << 20
BUFFER = 4 << 20
"""Bytes that are read at once of a tensor that goes to another file."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about one tensor.

    Args:
        shape: Its sizes.
        dtype: Its type: floating point, or an integer where the reader was asked for those.
        file: The file of the checkpoint that holds it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


class CheckpointReader:
    """The configuration and the lazily read tensors of one Hugging Face checkpoint directory.

    Args:
        directory: Where config.json and the safetensors files lie.
        field: How errors name this checkpoint (``experts.law``).
        integers: Whether integer tensors belong to it: indices and codes of a compressed model.
        known: Remembers what was found in files that have not changed; by default nothing does.

    Attributes:
        directory: As given.
        config: The content of config.json.
        tensors: What the headers say, by name, sorted.

    Raises:
        InputError: No config.json; weights missing, pickled, truncated, of a type that is not
            floating point (nor asked for); an index that disagrees with its files. All of it in
            one message.
    """

    def __init__(
        self,
        directory: Path,
        *,
        field: str = "checkpoint",
        integers: bool = False,
        known: KnownFiles | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._known = known
        self.field = field
        self._dtypes = FLOAT_DTYPES | INTEGER_DTYPES if integers else FLOAT_DTYPES
        self.config, faults = read_config(self.directory, field)
        self._files: dict[str, safe_open] = {}
        self._places: dict[str, Mapping[str, int]] = {}
        found = {}
        files, index, file_faults = weight_files(self.directory, field)
        faults += file_faults
        for file in files if not file_faults else ():
            infos, header_faults = self._read_header(file)
            faults += header_faults
            found.update(infos)
        faults += list(_index_faults(self.directory, index, found, self._files, field))
        if not faults and not found:
            faults.append(Fault(field, str(self.directory), "holds no tensors; fetch it again"))
        raise_faults(faults)
        self.tensors: Mapping[str, TensorInfo] = dict(sorted(found.items()))

    def tensor(self, name: str) -> torch.Tensor:
        """Return tensor ``name`` as a view of the mapped file: no copy, and not to be written to.

        Raises:
            InputError: The checkpoint has no such tensor.
        """
        return self._files[self._info(name).file].get_tensor(name)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield tensor ``name`` in flat pieces of one buffer: each is gone with the next.

        What is copied to another file costs the kernel a fifth less so than as a view: its pages
        are not mapped, and the disk is read ahead.

        Raises:
            InputError: The checkpoint has no such tensor, or its file has become shorter.
        """
        info = self._info(name)
        path = self.directory / info.file
        left = torch.Size(info.shape).numel() * info.dtype.itemsize
        buffer = torch.empty(min(left, BUFFER), dtype=torch.uint8)
        with path.open("rb") as file:
            file.seek(self._starts(info.file)[name])
            while left:
                piece = buffer[:left]
                if file.readinto(piece.numpy().data) < len(piece):
                    remedy = "has become shorter while it was read; fetch it again"
                    raise InputError(Fault(self.field, str(path), remedy))
                left -= len(piece)
                yield piece.view(info.dtype)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise InputError(Fault(self.field, str(self.directory), f"has no tensor {name}"))
        return self.tensors[name]

    def _starts(self, file: str) -> Mapping[str, int]:
        """Where each tensor of a file begins in it."""
        if file not in self._places:
            with (self.directory / file).open("rb") as opened:
                (size,) = struct.unpack("<Q", opened.read(8))
                entries = json.loads(opened.read(size))
            entries.pop("__metadata__", None)
            first = 8 + size
            self._places[file] = {n: first + e["data_offsets"][0] for n, e in entries.items()}
        return self._places[file]

    def fact(self, name: str, find: Callable[[], Any], *others: "CheckpointReader") -> Any:
        """What ``find`` finds in the weights of this checkpoint and of others, looked for once.

        Args:
            name: Of what is found, and of how.
            find: Returns something JSON can hold.
            *others: Checkpoints that it reads as well.
        """
        if self._known is None:
            return find()
        return self._known.fact(name, [reader.digests for reader in (self, *others)], find)

    @cached_property
    def digests(self) -> dict[str, str]:
        """{file: sha256} of its weights."""
        return {file: digest for file, (digest, _) in self._content.items()}

    @cached_property
    def non_finite(self) -> list[str]:
        """Names of the tensors that hold a NaN or an infinity, in order of name."""
        if self._known is None:
            files = (self.directory / file for file in self._files)
            return sorted(name for file in files for name in _non_finite_in(file))
        return sorted(name for _, names in self._content.values() for name in names)

    @cached_property
    def _content(self) -> dict[str, tuple[str, list[str]]]:
        """{file: its sha256, and its tensors that are not finite}, of one pass where it is new."""
        known, content = self._known or KnownFiles(None), {}
        for file in self._files:
            path, scanned = self.directory / file, list[list[str]]()
            digest = known.sha256(path, read=partial(_read, known, path, scanned))
            find = partial(known.near, _non_finite_in, path, scanned)
            content[file] = digest, known.fact("not finite", [digest], find)
        return content

    def _read_header(self, file: str) -> tuple[dict[str, TensorInfo], list[Fault]]:
        path = self.directory / file
        try:
            handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            remedy = f"is missing, truncated or no safetensors file ({error}); fetch it again"
            return {}, [Fault(self.field, str(path), remedy)]
        self._files[file] = handle
        infos, others = {}, {}
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            part = handle.get_slice(name)
            dtype = self._dtypes.get(part.get_dtype())
            if dtype is None:
                others[name] = part.get_dtype()
            else:
                infos[name] = TensorInfo(tuple(part.get_shape()), dtype, file)
        return infos, list(self._type_faults(path, others))

    def _type_faults(self, path: Path, others: Mapping[str, str]) -> Iterator[Fault]:
        """Tensors of types that are not read, in one fault: of a quantised model all matrices."""
        for name, kind in list(others.items())[:1]:
            more = f" ({len(others) - 1} more tensors are like it)" if len(others) > 1 else ""
            remedy = f"{name} is stored as {kind}{more}; use one of {', '.join(self._dtypes)}"
            settings = self.config.get("quantization_config")
            if settings is not None:
                how = settings.get("quant_method") if isinstance(settings, Mapping) else settings
                remedy += (
                    f": its config.json says quantization_config ({how}); give the model that "
                )
                remedy += "was quantised, or a GGUF file"
            yield Fault(self.field, str(path), remedy)


def chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield flat pieces (views) of at most ``CHUNK`` elements of a contiguous ``tensor``."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK]


def _read(known: KnownFiles, path: Path, scanned: list[list[str]]) -> str:
    """The sha256 of a file; what else is found on the way is added to ``scanned``."""
    digest, names = known.near(_hashed_and_scanned, path)
    scanned.append(names)
    return digest


def _hashed_and_scanned(path: Path) -> tuple[str, list[str]]:
    """The sha256 of a safetensors file, and what ``_scan`` finds in it, of one pass."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        names = _scan(file, digest.update)
    return digest.hexdigest(), names


def _non_finite_in(path: Path, scanned: Sequence[list[str]] = ()) -> list[str]:
    """As ``_scan``, unless the file was scanned already."""
    if scanned:
        return scanned[0]
    with path.open("rb") as opened:
        return _scan(opened, lambda data: None)


def _scan(file: BufferedReader, take: Callable[[memoryview], None]) -> list[str]:
    """Names of the tensors of a safetensors file that hold a NaN or an infinity.

    Smallest and largest of all values are asked for: they are NaN where one is.

    Args:
        file: Whole, as ``safe_open`` has found; read once, from its start.
        take: Is given every byte of it, in order.
    """
    length = file.read(8)
    header = file.read(struct.unpack("<Q", length)[0])
    take(memoryview(length))
    take(memoryview(header))
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    buffer = memoryview(bytearray(CHUNK * 8))
    names = set()
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        dtype = FLOAT_DTYPES.get(entry["dtype"])
        for at in range(start, end, len(buffer)):
            piece = buffer[: min(len(buffer), end - at)]
            file.readinto(piece)
            take(piece)
            if dtype is not None and not _is_finite(torch.frombuffer(piece, dtype=dtype)):
                names.add(name)
    return sorted(names)


def _is_finite(values: torch.Tensor) -> bool:
    return all(math.isfinite(value) for value in map(float, torch.aminmax(values)))


def read_config(directory: Path, field: str) -> tuple[dict, list[Fault]]:
    """Return the content of config.json, and what keeps it from being that of a model."""
    path = directory / "config.json"
    if not path.is_file():
        remedy = "has no config.json; give the directory of a Hugging Face checkpoint"
        return {}, [Fault(field, str(directory), remedy)]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, [Fault(field, str(path), f"cannot be read ({error}); let it be read")]
    except (ValueError, RecursionError) as error:
        return {}, [Fault(field, str(path), f"is not valid JSON ({error}); fetch it again")]
    if not isinstance(config, dict):
        return {}, [Fault(field, str(path), "is no object of attributes; fetch it again")]
    return config, []


def weight_files(
    directory: Path, field: str
) -> tuple[list[str], dict[str, str] | None, list[Fault]]:
    """Return the files to read, the index (name to file) if there is one, and what is wrong."""
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE], None, []
    index_path = directory / INDEX_FILE
    if index_path.is_file():
        try:
            index = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
            files = sorted(set(map(os.fspath, index.values())))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            remedy = f"is no index of weights ({error!r}); fetch it again"
            return [], None, [Fault(field, str(index_path), remedy)]
        remedy = "no name of a file beside it; fetch the checkpoint again"
        outside = [Fault(field, name, remedy) for name in files if Path(name).name != name]
        return files, index, outside
    pickles = sorted(p.name for p in directory.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        remedy = "holds pickled weights, which can run code; convert them to safetensors"
        return [], None, [Fault(field, str(directory / pickles[0]), remedy)]
    remedy = f"has neither {SINGLE_FILE} nor {INDEX_FILE}; give a checkpoint with its weights"
    return [], None, [Fault(field, str(directory), remedy)]


def _index_faults(
    directory: Path,
    index: Mapping[str, str] | None,
    found: Mapping[str, TensorInfo],
    readable: Mapping[str, safe_open],
    field: str,
) -> Iterator[Fault]:
    """Yield a fault for each tensor that index and files do not agree on; unread files aside."""
    if index is None:
        return
    place = str(directory / INDEX_FILE)
    for name, file in sorted(index.items()):
        if file in readable and (name not in found or found[name].file != file):
            yield Fault(field, place, f"names {name} in {file}, where it is not; fetch both again")
    for name in sorted(set(found) - set(index)):
        remedy = f"does not name {name}, which is in {found[name].file}; fetch both again"
        yield Fault(field, place, remedy)
