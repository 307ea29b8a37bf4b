"""A finished MoE as W_i = W_base + delta_i (Huang et al., arXiv 2503.01359, Eq. 2), read as needed.

N experts, D deltas of a matrix (one more than N with a universal FFN), [O, I] a matrix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from upcycle_core.architectures.dense_of import (
    dense_of,
    experts_of,
    moe_tensors,
    normalises,
    shared_width,
    target_of,
)
from upcycle_core.architectures.families import FAMILIES, QWEN2_MOE, family_of
from upcycle_core.architectures.family import LM_HEAD, Family, Target
from upcycle_core.architectures.headers import surplus_fault
from upcycle_core.backbone.write import weights_type
from upcycle_core.checkpoints.reader import CheckpointReader, chunks
from upcycle_core.ders.files import tensor_faults, type_faults
from upcycle_core.errors import Fault, InputError, raise_faults

MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Names of an FFN's matrices in a dense model of the supported families."""
SHARED = "model.layers.{layer}.mlp.shared_expert.{matrix}.weight"
SHARED_GATE = "model.layers.{layer}.mlp.shared_expert_gate.weight"
"""A Qwen2Moe adds sigmoid(g x) of its shared expert, whatever ``norm_topk_prob`` is. Where g is
zero that is one half of it for every token: a universal FFN whose down matrix is half the shared
expert's. Any other g weighs by token, which a universal FFN does not."""


@dataclass(frozen=True)
class Decomposed:
    """A stock MoE and what its experts are deltas of. Nothing is held: every call reads.

    Args:
        moe: The MoE.
        seed: The dense model whose FFNs are the base; None for the experts' mean.
        target: The MoE's architecture.
        family: The dense model's, as it will be in the result.
        dense: The content of its config.json.
        universal: Whether there is a universal FFN, the last of the D.
    """

    moe: CheckpointReader
    seed: CheckpointReader | None
    target: Target
    family: Family
    dense: Mapping
    universal: bool

    @classmethod
    def open(cls, moe: Path, base: Path | None) -> "Decomposed":
        """Read configurations and headers, and whether a shared expert is of use.

        Raises:
            InputError: A checkpoint that cannot be read or is not supported, tensors that are
                missing, misshapen or without use, a base of another shape, a shared expert that
                cannot be a universal FFN.
        """
        reader = CheckpointReader(moe, field="moe")
        seed = None if base is None else CheckpointReader(base, field="base")
        like = None if seed is None else family_of(seed.config, field="base.config.model_type")
        dense = dense_of(reader.config, like=like)
        target = target_of(reader.config)
        faults = list(_moe_faults(reader, moe_tensors(reader.config, dense)))
        if seed is not None and like is not None:
            faults += _seed_faults(seed, like, dense)
        raise_faults(faults)
        if target is not QWEN2_MOE:
            raise_faults(list(_zero_faults(reader, target, dense)))
        universal = target is QWEN2_MOE and _is_used(reader, dense)
        if universal:
            raise_faults(_universal_faults(reader, dense))
        return cls(reader, seed, target, FAMILIES[dense["model_type"]], dense, universal)

    @property
    def experts(self) -> int:
        """N."""
        return experts_of(self.moe.config)[0]

    @property
    def count(self) -> int:
        """D."""
        return self.experts + self.universal

    @property
    def layers(self) -> int:
        """Number of layers, all of them MoE."""
        return self.dense["num_hidden_layers"]

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of the MoE's weights."""
        return weights_type(self.moe)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name to [O, I] of an FFN's matrices."""
        width, hidden = self.dense["intermediate_size"], self.dense["hidden_size"]
        return dict(zip(MATRICES, [(width, hidden)] * 2 + [(hidden, width)], strict=True))

    def weight(self, layer: int, expert: int, matrix: str) -> Tensor:
        """A matrix of one expert, or of the universal FFN (``expert`` N), in fp32 or fp64."""
        exact = torch.promote_types(self.dtype, torch.float32)
        if expert == self.experts:
            shared = self.moe.tensor(SHARED.format(layer=layer, matrix=matrix)).to(exact)
            return shared / 2 if matrix == MATRICES[-1] else shared
        names = self.target.expert_ffn(layer, expert)
        name = dict(zip(MATRICES, names, strict=True))[matrix]
        return self.moe.tensor(name).to(exact)

    def base(self, layer: int, matrix: str) -> Tensor:
        """The shared base, [O, I] in the type it is stored in: deltas make up for its rounding."""
        if self.seed is not None:
            name = f"model.layers.{layer}.mlp.{matrix}.weight"
            return self.seed.tensor(name).to(self.dtype)
        total = self.weight(layer, 0, matrix).clone()
        for expert in range(1, self.count):
            total += self.weight(layer, expert, matrix)
        return (total / self.count).to(self.dtype)

    def deltas(self, layer: int, matrix: str) -> Tensor:
        """W_i - W_base of all experts, [D, O, I] in fp32 or fp64."""
        base_OI = self.base(layer, matrix)
        deltas_DOI = torch.empty(
            self.count, *base_OI.shape, dtype=torch.promote_types(self.dtype, torch.float32)
        )
        for expert, delta_OI in enumerate(deltas_DOI):
            delta_OI.copy_(self.weight(layer, expert, matrix)).sub_(base_OI)
        return deltas_DOI


def cosine(one: Tensor, other: Tensor) -> float:
    """Cosine of two tensors as vectors, summed in fp64; 1 if both are zero, NaN if one is not
    finite."""
    dot, ones, others = 0.0, 0.0, 0.0
    for a, b in zip(chunks(one), chunks(other), strict=True):
        x, y = a.double(), b.double()
        dot, ones, others = dot + float(x @ y), ones + float(x @ x), others + float(y @ y)
    if ones == others == 0:
        return 1.0
    norms = (ones * others) ** 0.5
    return 0.0 if norms == 0 else dot / norms


def ancestor_faults(
    source: Decomposed, cosines: Mapping[str, float], minimum: float
) -> Iterator[Fault]:
    """What keeps the base from being the experts' ancestor.

    Gates and up projections tell: a repair of joined experts writes down projections anew
    (``upcycle_core.dume.repair``), and those of one seed may then be as far apart as strangers'.

    Args:
        source: The MoE and its base.
        cosines: "LAYER.EXPERT.MATRIX" to the cosine of an expert's matrix to the base's.
        minimum: The least that is accepted.

    Yields:
        One fault: weights that are no numbers; otherwise the expert that is least like the base.
    """
    broken = [place for place, value in cosines.items() if not isfinite(value)]
    if broken:
        remedy = f"NaN or infinity in {', '.join(broken)} (layer.expert.matrix), or in the base"
        yield Fault("moe", str(source.moe.directory), f"{remedy}; train or fetch it again")
        return
    telling = {place: c for place, c in cosines.items() if not place.endswith(MATRICES[-1])}
    below = [place for place, value in telling.items() if value < minimum]
    if below:
        place = min(below, key=telling.__getitem__)
        layer, expert, matrix = place.split(".")
        base = str(source.seed.directory) if source.seed else "the experts' mean"
        yield Fault(
            "base",
            base,
            f"is no ancestor of the experts: layer {layer}, expert {expert}, {matrix} has cosine "
            f"{cosines[place]:.4f} to it, the lowest of {len(below)} below minimum_cosine "
            f"{minimum}; give the model that the experts began with, or lower minimum_cosine",
        )


def _moe_faults(
    reader: CheckpointReader, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[Fault]:
    tied = reader.config.get("tie_word_embeddings")
    yield from tensor_faults(reader, expected, spare=[LM_HEAD] if tied else [])
    if tied and LM_HEAD in reader.tensors:
        yield from surplus_fault(reader, LM_HEAD, "moe")
    yield from type_faults(reader)


def _seed_faults(seed: CheckpointReader, family: Family, dense: Mapping) -> Iterator[Fault]:
    """Why FFNs of ``seed`` are not of the experts' form."""
    try:
        full = family.resolve(seed.config, field="base.config")
    except InputError as error:
        yield from error.faults
        return
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "hidden_act"):
        if full[name] != dense[name]:
            remedy = f"the MoE's experts have {dense[name]!r}; give the model that they began with"
            yield Fault(f"base.config.{name}", full[name], remedy)
    expected = family.tensors(seed.config)
    for name in (n for layer in range(full["num_hidden_layers"]) for n in family.ffn(layer)):
        if name not in seed.tensors or seed.tensors[name].shape != expected[name]:
            remedy = f"lacks {name} of shape {list(expected[name])}; fetch it again"
            yield Fault("base", str(seed.directory), remedy)


def _zero_faults(reader: CheckpointReader, target: Target, dense: Mapping) -> Iterator[Fault]:
    """Tensors of the target that deltas do not express, unless they are zero."""
    for layer in range(dense["num_hidden_layers"]):
        for name in (zero.format(layer=layer) for zero in target.zeros):
            if reader.tensor(name).any():
                remedy = "must be zero: it changes which experts are chosen, and DeRS has no "
                yield Fault(f"moe.{name}", "not zero", f"{remedy}place for it; give another MoE")


def _is_used(reader: CheckpointReader, dense: Mapping) -> bool:
    """Whether a layer's shared expert holds anything but zeros."""
    names = (
        SHARED.format(layer=layer, matrix=matrix)
        for layer in range(dense["num_hidden_layers"])
        for matrix in MATRICES
    )
    return any(bool(reader.tensor(name).any()) for name in names)


def _universal_faults(reader: CheckpointReader, dense: Mapping) -> Iterator[Fault]:
    """Why a shared expert cannot become one more delta."""
    width = shared_width(reader.config)
    if width != dense["intermediate_size"]:
        remedy = f"a universal FFN must have the experts' width, {dense['intermediate_size']}"
        yield Fault("moe.config.shared_expert_intermediate_size", width, remedy)
    if normalises(reader.config):
        remedy = "beside a shared expert that is used, only false can be expressed"
        yield Fault("moe.config.norm_topk_prob", True, remedy)
    gates = [SHARED_GATE.format(layer=layer) for layer in range(dense["num_hidden_layers"])]
    weighing = [name for name in gates if reader.tensor(name).any()]
    if weighing:
        remedy = f"{weighing[0]} weighs the shared expert by token, and only a gate of "
        yield Fault("moe", str(reader.directory), remedy + "zeros can be expressed")
