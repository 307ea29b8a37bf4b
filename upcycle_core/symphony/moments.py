"""What anchor and model do on the same text, added up: the cross-moments that alignment needs.

Memory of one group of layers, in bytes: 8 I^2 + 8 (Q N)^2 for each of its layers and 8 H^2 for the
residual stream, both models without lm_head, and a batch's features of the anchor: B S (I + Q N +
2 H) numbers of ``CalibrationConfig.features`` for each layer. A file is as large as the sums.

Shapes: I neurons, Q query heads of size N, H hidden size. Sums are fp64.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from upcycle_core.activations.cross import CrossMoments
from upcycle_core.activations.moments import save_sums
from upcycle_core.activations.pairs import (
    collect_pairs,
    head_reader,
    neuron_reader,
    residual_readers,
)
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.residual import unit_rows
from upcycle_core.checkpoints.load import DTYPES, load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.config import Bos
from upcycle_core.errors import Fault, InputError
from upcycle_core.precision import weights_type
from upcycle_core.progress import Progress, Silent
from upcycle_core.symphony.config import CalibrationConfig
from upcycle_core.symphony.texts import paired_texts

KIND = "cross-moments"
RESIDUAL = "residual"
KINDS = (RESIDUAL, "heads", "neurons")


def layer_groups(layers_total: int, per_group: int) -> list[tuple[int, ...]]:
    """Layers 0 to ``layers_total`` - 1 in order, ``per_group`` at a time, the rest at the end."""
    every = range(layers_total)
    return [tuple(every[start : start + per_group]) for start in every[::per_group]]


def collect_moments(
    anchor: Path,
    model: Path,
    texts: Mapping[str, Path],
    out: Path,
    *,
    config: CalibrationConfig,
    layers: Sequence[int],
    residual: bool = True,
    heads: bool = True,
    neurons: bool = True,
    names: tuple[str, str] = ("anchor", "model"),
    bos: Bos = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Forward the text of all domains through both models once and write their cross-moments.

    Every token of every domain is added in place to one set of sums: of neurons act(gate) * up and
    of what heads say before o_proj by layer; of the residual stream before all norms of ``layers``
    in one, rows at length one (the final norm comes with the last layer, so that all groups of
    layers together count the whole stream). Nothing behind the last of ``layers`` is computed.

    Args:
        anchor: Checkpoint of the first model, with its tokenizer.
        model: Checkpoint of the second, of the same shape.
        texts: Domain to the Parquet file of its documents.
        out: The safetensors file of the sums, written whole or not at all.
        config: Text, batches and precision.
        layers: Which layers are counted.
        residual, heads, neurons: Whether the stream, what heads say, or neurons are counted.
        names: What faults call the models (``models.NAME``).
        bos: Whether a beginning-of-sequence token stands before each document.
        device: Where both models run and sums are kept.
        progress: Hears of every batch, in the anchor's tokens.

    Returns:
        ``tokens`` and ``pairs`` by domain: the anchor's tokens, and positions that were counted.

    Raises:
        InputError: A domain has no text; a model computes what is not finite.
    """
    progress = progress or Silent()
    paired = paired_texts(texts, anchor, model, config=config, bos=bos)
    kinds = [name for name, on in zip(KINDS, (residual, heads, neurons), strict=True) if on]
    moments, paths = _accumulators(CheckpointReader(anchor), layers, kinds, device)
    first, second = (_decoder(place, config, device) for place in (anchor, model))
    progress.start(f"activations of {names[1]}", sum(paired.tokens.values()), "tokens")
    collect_pairs(
        first,
        second,
        paired.batches(),
        {path: moments[key] for path, key in paths.items()},
        change=partial(_features, paths, DTYPES[config.features]),
        names=("models." + names[0], "models." + names[1]),
        progress=progress,
    )
    counts = {"tokens": dict(paired.tokens), "pairs": dict(paired.pairs)}
    save_sums(out, moments, kind=KIND, header={**counts, "layers": sorted(layers)})
    return counts


def layer_moments(file: Path, kind: Literal["neurons", "heads"], layer: int) -> CrossMoments:
    """A layer's cross-moments, anchor by model; nothing else is read.

    Returns:
        Of its neurons [I, I], or of what its heads say [Q N, Q N].

    Raises:
        InputError: ``file`` cannot be read, or does not have them.
    """
    return _read(file, f"{kind}.{layer}")


def residual_moments(files: Sequence[Path]) -> CrossMoments:
    """The cross-moments [H, H] of unit rows of the residual stream, of all groups of layers.

    Args:
        files: Of all groups; they are added in sorted order.

    Raises:
        InputError: A file cannot be read, or does not have them.
    """
    first, *others = [_read(file, RESIDUAL) for file in sorted(files)]
    total = CrossMoments(first.size)
    for part in (first, *others):
        total.merge(part)
    return total


def _decoder(directory: Path, config: CalibrationConfig, device: str) -> nn.Module:
    """The model without lm_head."""
    dtype = weights_type(config.precision, device)
    return load_causal_lm(directory, dtype=dtype, device=device).get_decoder()


def _accumulators(
    reader: CheckpointReader, layers: Sequence[int], kinds: Sequence[str], device: str
) -> tuple[dict[str, CrossMoments], dict[str, str]]:
    """Empty sums by their name in the file, and the modules whose input is counted in them."""
    family = family_of(reader.config)
    last = family.resolve(reader.config)["num_hidden_layers"] - 1
    paths: dict[str, str] = {}
    if RESIDUAL in kinds:
        stream = residual_readers(family, layers, final=last in layers)
        paths |= dict.fromkeys(stream, RESIDUAL)
    if "heads" in kinds:
        paths |= {head_reader(layer): f"heads.{layer}" for layer in layers}
    if "neurons" in kinds:
        paths |= {neuron_reader(family, layer): f"neurons.{layer}" for layer in layers}
    shapes = family.tensors(reader.config)
    # What a module reads runs over the last axis of its weight.
    sizes = {key: shapes[f"{path}.weight"][-1] for path, key in paths.items()}
    return {key: CrossMoments(size, device=device) for key, size in sizes.items()}, paths


def _features(paths: Mapping[str, str], dtype: torch.dtype, path: str, x: Tensor) -> Tensor:
    """What is counted of what a module reads; sums and products are of the same rounded numbers."""
    return (unit_rows(x) if paths[path] == RESIDUAL else x).to(dtype)


def _read(file: Path, key: str) -> CrossMoments:
    try:
        with safe_open(file, "pt") as opened:
            if f"{key}.{CrossMoments.parts[0]}" in opened.keys():  # noqa: SIM118 (a handle is no mapping)
                tensors = {part: opened.get_tensor(f"{key}.{part}") for part in CrossMoments.parts}
                return CrossMoments.from_tensors(tensors)
            found = json.loads((opened.metadata() or {}).get(KIND, "{}"))
    except (SafetensorError, OSError) as error:
        remedy = f"cannot be read ({error}): make it again"
        raise InputError(Fault(KIND, str(file), remedy)) from error
    remedy = f"does not have {key}, its layers are {found.get('layers')}: give another file"
    raise InputError(Fault(KIND, str(file), remedy))
