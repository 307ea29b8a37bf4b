"""The backbone of disparate models: everything but FFNs, merged by kind of tensor, streamed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle_core.architectures.axes import axes_of
from upcycle_core.architectures.compare import MUST_AGREE, computed, has_length
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, Family, rope_fields
from upcycle_core.architectures.headers import tensor_faults
from upcycle_core.backbone.slerp import slerp, spherical_mean
from upcycle_core.backbone.vocabulary import Union, merge_rows, write_union_tokenizer
from upcycle_core.backbone.weights import checked_weights
from upcycle_core.backbone.write import (
    GENERATION_CONFIG,
    Plan,
    common_config,
    common_type,
    write_generation_config,
    write_tensors,
)
from upcycle_core.checkpoints.reader import CheckpointReader, chunks
from upcycle_core.checkpoints.writer import write_json
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.progress import Progress
from upcycle_core.symphony.config import MergeConfig

LENGTH = "max_position_embeddings"


def write_merged_backbone(
    models: Mapping[str, Path],
    union: Union,
    out: Path,
    *,
    config: MergeConfig,
    anchor: str,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the shared backbone of Symphony-MoE (section 3.2): what is no FFN, merged.

    `embeddings` of ``config`` holds for embed_tokens and lm_head, whose rows are matched by token;
    `attention` for the matrices of q, k, v and o; `norms` for everything with one axis, biases and
    q_norm and k_norm included. Along the sphere two models are SLERP at t = w_2 / (w_1 + w_2), bit
    by bit mergekit's, and more are their spherical mean. Models are taken in the order of their
    names: that in which they are given changes no bit. Of one model everything stays as it is.

    One tensor of every model and the result are held at a time; where embeddings are merged along
    the sphere, copies of the rows that all models have as well.

    Args:
        models: Name to dense checkpoint, all in one coordinate system, ids as the model's own.
        union: Of their vocabularies, its rows in the order of ``models``.
        out: The directory that is written: weights without FFNs; the ruling model's config.json and
            generation configuration, with its special tokens, for the union's number of tokens; the
            union's tokenizer. A special id that is no token of the ruling model's, as of a row that
            pads its matrices, becomes None.
        config: What is done with which kind. A model without a weight has 1.
        anchor: The model that "anchor" means.
        max_shard_bytes, progress: As for ``write_model``.

    Returns:
        Special ids that became None, by name.

    Raises:
        InputError: The models do not fit together, or the union not to them; tied and untied ones
            are mixed; a weight or the anchor is of no model; a tensor has no mean on the sphere.
    """
    sources = _Sources.open(models, union, config, anchor)
    ruling = sources.readers[sources.union.ruling]
    config_of_type = common_config([ruling, *sources.readers])
    content = _known_ids(config_of_type, union) | {"vocab_size": len(union.tokens)} | sources.length
    plan: Plan = {
        name: (shape, sources.dtype, partial(sources.merged, name))
        for name, shape in sources.family.tensors(content, ffn=False).items()
    }
    what = "merging the backbone"
    write_tensors(out, plan, max_shard_bytes=max_shard_bytes, what=what, progress=progress)
    write_json(out / "config.json", content)
    write_union_tokenizer(union, out)
    write_generation_config(ruling, out)
    told = json.loads((out / GENERATION_CONFIG).read_text(encoding="utf-8"))
    if (known := _known_ids(told, union)) != told:
        write_json(out / GENERATION_CONFIG, known)
    before, after = told | ruling.config, known | content
    return {name: before[name] for name in _id_names(before) if before[name] != after[name]}


def agreement_faults(reader: CheckpointReader, first: CheckpointReader) -> list[Fault]:
    """What keeps a dense checkpoint from being merged with another.

    Vocabularies, types and lengths may differ.

    Args:
        reader: The checkpoint; its tensors are accounted for.
        first: What it must agree with; of a supported family.
    """
    types = reader.config.get("model_type"), first.config["model_type"]
    if types[0] != types[1]:
        remedy = f"another architecture than {first.field} ({types[1]}); use one family"
        return [Fault(f"{reader.field}.config.model_type", types[0], remedy)]
    family = family_of(first.config)
    try:
        ours = family.resolve(reader.config, field=f"{reader.field}.config")
    except InputError as error:
        return list(error.faults)
    theirs = family.resolve(first.config)
    faults = []
    merged = {"vocab_size"} if has_length(ours, theirs) else {"vocab_size", LENGTH}
    for name in MUST_AGREE:
        if name not in merged and computed(ours.get(name)) != computed(theirs.get(name)):
            remedy = f"differs from {first.field} ({theirs.get(name)!r}); "
            if name == "tie_word_embeddings":
                remedy += "use models whose lm_head is tied, or models whose lm_head is not"
            else:
                remedy += "use models of one architecture"
            faults.append(Fault(f"{reader.field}.config.{name}", ours.get(name), remedy))
    return faults + tensor_faults(reader, family, reader.field)


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum_i w_i v_i / sum_i w_i, summed in fp32 (fp64 for fp64) in order and cast back.

    With weights of 1 it is ``average_tensors`` to the bit. Works through the tensors in pieces.

    Args:
        tensors: Of one shape and type; at least one.
        weights: One a tensor, not all zero.
    """
    first = tensors[0]
    exact = torch.promote_types(first.dtype, torch.float32)
    result = torch.empty_like(first, memory_format=torch.contiguous_format)
    for piece, *parts in zip(chunks(result), *map(chunks, tensors), strict=True):
        total = torch.zeros_like(piece, dtype=exact)
        for part, weight in zip(parts, weights, strict=True):
            total += part.to(exact) * weight
        piece.copy_(total / math.fsum(weights))
    return result


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """Models in the order of their names, and what is made of them."""

    readers: Sequence[CheckpointReader]
    weights: Sequence[float]
    union: Union
    family: Family
    config: MergeConfig
    anchor: int

    @classmethod
    def open(
        cls, models: Mapping[str, Path], union: Union, config: MergeConfig, anchor: str
    ) -> "_Sources":
        """Read configurations and headers, and find everything that speaks against it."""
        given, names = list(models), sorted(models)
        weights = [config.weights.get(name, 1.0) for name in names]
        faults = list(_choice_faults(names, union, config, anchor))
        readers: list[CheckpointReader] = []
        try:
            checked_weights(len(names), weights, "symphony.merge")
        except InputError as error:
            faults += error.faults
        for name in names:
            try:
                readers.append(CheckpointReader(models[name], field=f"experts.{name}"))
            except InputError as error:
                faults += error.faults
        raise_faults(faults)
        family = family_of(readers[0].config, field=f"{readers[0].field}.config.model_type")
        raise_faults(fault for r in readers for fault in agreement_faults(r, readers[0]))
        order = [given.index(name) for name in names]
        rows = union.rows[order]
        raise_faults(_row_faults(readers, rows))
        return cls(
            family=family,
            readers=readers,
            weights=weights,
            union=replace(union, rows=rows, ruling=order.index(union.ruling)),
            config=config,
            anchor=names.index(anchor),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the backbone: the narrowest that holds the weights of all."""
        return common_type(self.readers)

    @property
    def length(self) -> dict[str, Any]:
        """What the shortest model says of positions, where lengths differ."""
        full = [self.family.resolve(reader.config) for reader in self.readers]
        lengths = {own[LENGTH] for own in full}
        if len(lengths) == 1:
            return {}
        rope = full[self.union.ruling]["rope_parameters"]
        return {LENGTH: min(lengths), **rope_fields(rope)}

    @property
    def counted(self) -> list[int]:
        """The models that have a weight."""
        return [index for index, weight in enumerate(self.weights) if weight > 0]

    def merged(self, name: str) -> Tensor:
        """One tensor of the backbone."""
        tensors = [reader.tensor(name).to(self.dtype) for reader in self.readers]
        letters = axes_of(self.family, name)
        if letters[0] == "V":
            return self._merged_rows(name, tensors)
        how = self.config.attention if len(letters) == 2 else self.config.norms
        if how == "anchor" or len(tensors) == 1:
            return tensors[self.anchor]
        if how == "slerp":
            return self._on_sphere(name, [tensors[i] for i in self.counted])
        return weighted_mean(tensors, self.weights)

    def _merged_rows(self, name: str, matrices: Sequence[Tensor]) -> Tensor:
        how = self.config.embeddings
        naive = how == "naive" and len(matrices) > 1
        result = merge_rows(self.union, matrices, weights=self.weights, naive=naive, field=name)
        rows = self.union.rows
        if how == "anchor":
            has = rows[self.anchor] >= 0
            result[has] = matrices[self.anchor][rows[self.anchor, has]]
        elif how == "slerp":
            shared = (rows[self.counted] >= 0).all(dim=0)
            parts = [matrices[i][rows[i, shared]] for i in self.counted]
            result[shared] = self._on_sphere(name, parts)
        return result

    def _on_sphere(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """The mean of tensors of the models that count, along the sphere."""
        weights = [self.weights[i] for i in self.counted]
        if len(tensors) == 2:
            return slerp(tensors[0], tensors[1], weights[1] / math.fsum(weights), field=name)
        return spherical_mean(tensors, weights, field=name)


def _id_names(told: Mapping[str, Any]) -> list[str]:
    return [name for name in told if name.endswith("_token_id")]


def _known_ids(told: Mapping[str, Any], union: Union) -> dict[str, Any]:
    """A configuration whose special ids are tokens of the ruling model; others are None."""
    own = union.rows[union.ruling].tolist()

    def known(index: int) -> bool:
        # Below 0 is how some say that there is none.
        return index < 0 or (index < len(own) and own[index] == index)

    ids: dict[str, Any] = {}
    for name in _id_names(told):
        value = told[name]
        if isinstance(value, list):
            value = [index for index in value if known(index)] or None
        ids[name] = value if not isinstance(value, int) or known(value) else None
    return {**told, **ids}


def _choice_faults(
    names: Sequence[str], union: Union, config: MergeConfig, anchor: str
) -> Iterator[Fault]:
    for name in sorted(config.weights.keys() - set(names)):
        remedy = f"is the weight of no model; the models are {', '.join(names)}"
        yield Fault(f"symphony.merge.weights.{name}", config.weights[name], remedy)
    if anchor not in names:
        yield Fault("symphony.anchor", anchor, f"is no model; choose one of {', '.join(names)}")
    if len(union.rows) != len(names):
        remedy = f"are not those of the union, which is of {len(union.rows)}"
        yield Fault("experts", list(names), remedy)


def _row_faults(readers: Sequence[CheckpointReader], rows: Tensor) -> Iterator[Fault]:
    for reader, ids in zip(readers, rows, strict=True):
        last, size = int(ids.max()), reader.tensors[EMBEDDING].shape[0]
        if last >= size:
            remedy = f"has {size} rows and none for token {last} of its tokenizer; resize the "
            remedy += "model's embedding, or remove the token"
            yield Fault(reader.field, str(reader.directory), remedy)
