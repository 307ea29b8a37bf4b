"""A stranger brought into the anchor's coordinates: from cross-moments to an aligned checkpoint.

Shapes: I neurons, Q query heads, G KV groups, N head size, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from upcycle_core.activations.cross import CrossMoments, similarity
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.heads import (
    HeadMove,
    match_heads,
    move_heads,
    pairs_from_activations,
)
from upcycle_core.backbone.residual import (
    ResidualMap,
    embedding_moments,
    fold_norms,
    residual_map,
    rotate_residual,
)
from upcycle_core.backbone.rewrite import Read, Transform, read_untied, rewrite, transformed
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tensor_file import read_header, save_atomically
from upcycle_core.errors import Fault, InputError
from upcycle_core.symphony.assignment import Assignment, assign, permute_neurons
from upcycle_core.symphony.config import AlignmentConfig

KIND = "alignment"


@dataclass(frozen=True, kw_only=True)
class LayerAlignment:
    """What becomes of one layer.

    Args:
        neurons: Which FFN neuron comes to stand where; None leaves them.
        heads: Which heads come to stand where, and how their values turn; None leaves them.
    """

    neurons: Assignment | None
    heads: HeadMove | None


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What becomes of one model.

    Args:
        layers: By layer; a layer that is not there stays as it is.
        residual: The rotation of its residual stream; None leaves the stream, and norms, as is.
    """

    layers: Mapping[int, LayerAlignment]
    residual: ResidualMap | None


def align_layer(
    neurons: CrossMoments | None,
    heads: CrossMoments | None,
    *,
    config: AlignmentConfig,
    heads_count: int,
    groups: int,
) -> LayerAlignment:
    """Decide one layer: one assignment problem of its neurons, nested ones of its heads.

    Neither depends on the basis of the residual stream, so that moments of the models as they
    were serve with and without its rotation.

    Args:
        neurons: Of act(gate) * up in anchor and model [I, I]; not looked at for ``neurons: none``.
        heads: Of o_proj's input [Q N, Q N]; not looked at for ``heads: none``.
        config: What is aligned, and by which measure.
        heads_count: Q.
        groups: G.

    Raises:
        InputError: The solver is not installed.
        ValueError: What ``config`` asks for is not there; nothing was counted, or what was counted
            is not finite.
    """
    order = move = None
    if config.neurons != "none":
        if neurons is None:
            raise ValueError(f"neurons = {config.neurons!r} asks for their cross-moments")
        alike = similarity(neurons, config.neurons)
        order = assign(alike, fraction=config.fraction, solver=config.solver)
    if config.heads == "match":
        if heads is None:
            raise ValueError("heads = 'match' asks for their cross-moments")
        heads.checked_rows()
        move = match_heads(pairs_from_activations(heads, heads=heads_count, groups=groups))
    return LayerAlignment(neurons=order, heads=move)


def embedding_rotation(anchor: Path, model: Path, tokens: tuple[Tensor, Tensor]) -> ResidualMap:
    """The rotation into the anchor's basis that embeddings and heads of shared tokens tell.

    Args:
        anchor: Its checkpoint, norms not folded.
        model: The stranger's.
        tokens: Ids of the shared tokens in the anchor's and in the stranger's vocabulary [T], [T].

    Raises:
        InputError: The models share no token.
    """
    if not len(tokens[0]):
        remedy = f"{model} shares no token with the anchor {anchor}; use procrustes or none"
        raise InputError(Fault("symphony.alignment.residual", "embeddings", remedy))
    first, second = (_folded(CheckpointReader(directory)) for directory in (anchor, model))
    return residual_map(embedding_moments(first, second, tokens))


def write_aligned(model: Path, alignment: Alignment, out: Path, *, max_shard_bytes: int) -> None:
    """Write the model in the anchor's coordinates; it computes what it computed.

    Order of neurons alone changes no value of any tensor. With a rotation the norms are folded
    and lm_head is untied (``write_folded`` is the anchor's part). Transforms are chained in fp32,
    with rotations found in fp64, and rounded once.

    Args:
        model: Its checkpoint.
        alignment: What becomes of it.
        out: The directory that is written: weights, config.json, tokenizer.
        max_shard_bytes: Size of one safetensors file.

    Raises:
        InputError: A tensor is missing, misshapen or has no place.
    """
    reader = CheckpointReader(model)
    family = family_of(reader.config)
    transforms: list[Transform] = []
    if alignment.residual is not None:
        transforms.append(fold_norms(family, reader.tensor))
        transforms.append(rotate_residual(family, alignment.residual.rotation))
    layers = alignment.layers.items()
    moves = {layer: part.heads for layer, part in layers if part.heads is not None}
    orders = {layer: part.neurons.order for layer, part in layers if part.neurons is not None}
    transforms += [move_heads(family, moves), permute_neurons(family, orders)]
    untie = alignment.residual is not None
    rewrite(reader, out, transforms, untie=untie, max_shard_bytes=max_shard_bytes)


def write_folded(anchor: Path, out: Path, *, max_shard_bytes: int) -> None:
    """Write the anchor as ``write_aligned`` writes rotated strangers: norms folded, head untied."""
    reader = CheckpointReader(anchor)
    fold = fold_norms(family_of(reader.config), reader.tensor)
    rewrite(reader, out, [fold], untie=True, max_shard_bytes=max_shard_bytes)


def alignment_facts(alignment: Alignment) -> dict[str, Any]:
    """What a report says of it, as JSON: similarities before and after, how many moved.

    Returns:
        ``layers``: a list of ``layer``, ``neurons`` (before, after, moved, aligned, dead,
        dead_anchor) and ``heads`` (before, after, moved); ``residual`` (before, after, rank). None
        stands for what was left as it is.
    """
    layers = []
    for layer, part in sorted(alignment.layers.items()):
        neurons, heads = part.neurons, part.heads
        entry: dict[str, Any] = {"layer": layer, "neurons": None, "heads": None}
        if neurons is not None:
            entry["neurons"] = {**_numbers(neurons), "moved": neurons.moved}
        if heads is not None:
            places = torch.arange(len(heads.queries))
            entry["heads"] = {**_numbers(heads), "moved": int((heads.queries != places).sum())}
        layers.append(entry)
    residual = alignment.residual
    return {"layers": layers, "residual": None if residual is None else _numbers(residual)}


def save_alignment(path: Path, alignment: Alignment) -> None:
    """Write an alignment as one safetensors file, whole or not at all; equal content, equal bytes.

    Args:
        path: The file; it is on the disk when this returns.
        alignment: Of a whole model, or of some layers.
    """
    parts: dict[str, object | None] = {"residual": alignment.residual}
    for layer, part in alignment.layers.items():
        parts |= {f"{layer}.neurons": part.neurons, f"{layer}.heads": part.heads}
    found = {name: part for name, part in parts.items() if part is not None}
    header = {
        "layers": sorted(alignment.layers),
        "parts": {n: _numbers(p) for n, p in found.items()},
    }
    tensors = {
        f"{name}.{key}": value.cpu().contiguous()
        for name, part in found.items()
        for key, value in vars(part).items()
        if isinstance(value, Tensor)
    }
    save_atomically(path, tensors, kind=KIND, header=header)


def load_alignment(path: Path) -> Alignment:
    """Read what ``save_alignment`` wrote.

    Raises:
        InputError: The file is missing, broken, or of another kind.
    """
    header, tensors = read_header(path, kind=KIND), load_file(path)

    def part(kind: type, name: str) -> Any:
        if name not in header["parts"]:
            return None
        own = {
            n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")
        }
        return kind(**header["parts"][name], **own)

    layers = {
        layer: LayerAlignment(
            neurons=part(Assignment, f"{layer}.neurons"), heads=part(HeadMove, f"{layer}.heads")
        )
        for layer in header["layers"]
    }
    return Alignment(layers=layers, residual=part(ResidualMap, "residual"))


def _folded(reader: CheckpointReader) -> Read:
    """Name to tensor of the model with folded norms and a head of its own."""
    return transformed(read_untied(reader), [fold_norms(family_of(reader.config), reader.tensor)])


def _numbers(part: object) -> dict[str, Any]:
    """The attributes of a part that are numbers."""
    return {name: value for name, value in vars(part).items() if not isinstance(value, Tensor)}
