"""A DeRS checkpoint's files: weights, code and checksums."""

import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from upcycle_core.architectures.family import RECOMPUTED
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.writer import sync_directory, sync_file
from upcycle_core.errors import Fault, InputError

_CODE = sorted((Path(__file__).parent / "model").glob("*_ders.py"))
ARCHITECTURE = {
    "architectures": ["DersForCausalLM"],
    "model_type": "ders",
    "auto_map": {
        "AutoConfig": "configuration_ders.DersConfig",
        "AutoModel": "modeling_ders.DersModel",
        "AutoModelForCausalLM": "modeling_ders.DersForCausalLM",
    },
}
"""What config.json says of the classes."""


def ders_name(name: str) -> str:
    """Name of a dense model's tensor inside the DeRS model."""
    inside = name.startswith("model.")
    return f"model.decoder.{name.removeprefix('model.')}" if inside else name


def mlp_name(layer: int) -> str:
    """Name of a layer's FFN inside the DeRS model."""
    return f"model.decoder.layers.{layer}.mlp"


def ffn_place(name: str) -> tuple[int, str]:
    """Layer and matrix of a dense model's FFN tensor."""
    _, _, layer, _, matrix, _ = name.split(".")
    return int(layer), matrix


def tensor_faults(
    reader: CheckpointReader, expected: Mapping[str, tuple[int, ...]], *, spare: Collection[str]
) -> Iterator[Fault]:
    """Account for every tensor: what is missing, misshapen, or there with no use for it.

    Args:
        reader: The checkpoint.
        expected: Name to shape of its tensors.
        spare: Names that may be there as well.
    """
    place = str(reader.directory)
    for name, shape in expected.items():
        info = reader.tensors.get(name)
        if info is None:
            remedy = f"lacks tensor {name}; fetch the checkpoint again"
            yield Fault(reader.field, place, remedy)
        elif info.shape != shape:
            remedy = f"{name} has shape {list(info.shape)}; config.json expects {list(shape)}"
            yield Fault(reader.field, place, remedy)
    for name in reader.tensors:
        if name not in expected and name not in spare and not RECOMPUTED.fullmatch(name):
            remedy = f"holds {name}, which its architecture has no place for"
            yield Fault(reader.field, place, remedy)


def type_faults(reader: CheckpointReader) -> Iterator[Fault]:
    """Weights of more than one type: base and deltas are of one."""
    dtypes = {
        str(info.dtype) for n, info in reader.tensors.items() if RECOMPUTED.fullmatch(n) is None
    }
    if len(dtypes) > 1:
        remedy = f"mixes {', '.join(sorted(dtypes))}; save it in one type"
        yield Fault(reader.field, str(reader.directory), remedy)


def weight_bytes(directory: Path) -> int:
    """Size of all weight files."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def write_code(out: Path) -> None:
    """Copy the code of the architecture, for whoever loads the model without this package."""
    for file in _CODE:
        shutil.copyfile(file, out / file.name)
        sync_file(out / file.name)


def write_checksums(out: Path) -> None:
    """Write ``checksums.json``; it is on the disk when this returns."""
    from upcycle_core.ders.model import configuration_ders  # imports models of transformers

    configuration_ders.write_checksums(out)
    sync_file(out / configuration_ders.CHECKSUMS)
    sync_directory(out)


def verify(directory: Path, *, field: str) -> None:
    """Hold the files of a checkpoint against its ``checksums.json``, as ``from_pretrained`` does.

    Raises:
        InputError: All files that are missing or were altered.
    """
    from upcycle_core.ders.model import configuration_ders  # imports models of transformers

    try:
        configuration_ders.verify_checksums(directory)
    except ValueError as error:
        raise InputError(Fault(field, str(directory), str(error))) from error
