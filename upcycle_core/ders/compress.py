"""DeRS compression (Huang et al., arXiv 2503.01359, section 3.3): a MoE as a base and deltas.

N experts, D deltas of a matrix (one more than N with a universal FFN), [O, I] a matrix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from upcycle_core.architectures.dense_of import experts_of, normalises
from upcycle_core.backbone.write import Plan, write_model
from upcycle_core.checkpoints.place import new_directory, place_faults
from upcycle_core.checkpoints.tokenizer import absence_faults
from upcycle_core.ders.codec import Codec, codec_of, ffn_bits, rank_of_energy
from upcycle_core.ders.config import CodecConfig
from upcycle_core.ders.decompose import Decomposed, ancestor_faults, cosine
from upcycle_core.ders.files import (
    ARCHITECTURE,
    ders_name,
    ffn_place,
    mlp_name,
    weight_bytes,
    write_checksums,
    write_code,
)
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.progress import Progress, Silent


@dataclass(frozen=True)
class CompressionReport:
    """What came out of a compression; ``dataclasses.asdict`` of it is JSON.

    Args:
        base: What deltas were taken from: the seed's FFNs, or the experts' mean.
        delta: How they are stored, as in config.json.
        universal: Whether a universal FFN is the last of the deltas.
        bytes_on_disk: Of the weight files.
        bytes_by_formula: Of the same by ``codec.ffn_bits``; headers of files are not in it.
        bytes_of_original: Of the MoE's weight files.
        parameters: Numbers that are stored; indices and scales are not counted.
        cosines: "LAYER.EXPERT.MATRIX" to the cosine of an expert's matrix and the base's.
        relative_errors: "LAYER.MATRIX" to ||delta - decoded|| / ||delta||, over all experts.
    """

    base: Literal["seed", "mean"]
    delta: dict[str, Any]
    universal: bool
    bytes_on_disk: int
    bytes_by_formula: int
    bytes_of_original: int
    parameters: int
    cosines: dict[str, float]
    relative_errors: dict[str, float]


def compress(
    moe: Path,
    out: Path,
    *,
    config: CodecConfig,
    base: Path | None = None,
    minimum_cosine: float = 0.5,
    seed: int = 0,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> CompressionReport:
    """Write a stock MoE as one base and light deltas, in a form that runs as it is.

    W_base is the FFN of ``base``, or the mean of the experts; delta_i = W_i - W_base is encoded
    (Eqs. 3 to 5). All else of the MoE is taken over unchanged. Weights are read three times, with
    ``energy`` four times, one matrix of all experts at a time. ``out`` appears when it is complete.

    A Qwen2Moe's shared expert of zeros is left out. One that is used becomes a universal FFN and
    the last delta (the paper's appendix A), where it can: see ``ders.decompose.SHARED_GATE``.

    Args:
        moe: A checkpoint of a stock MoE of ``architectures.families``; it is only read.
        out: The directory that is written, with the code of the architecture.
        config: How deltas are stored.
        base: The dense checkpoint that the experts began with; None for their mean.
        minimum_cosine: Least cosine of any expert's gate or up projection to the base's.
        seed: Decides which entries a random drop keeps.
        max_shard_bytes: Size of one safetensors file.
        progress: Hears of every matrix that is compared and of every tensor that is written.

    Returns:
        Sizes, cosines and errors.

    Raises:
        InputError: Settings that cannot be, a rank above the matrices, a MoE or base that is not
            supported, no tokenizer, a base that is no ancestor of the experts, ``out`` in use.
    """
    faults = [*config.faults("codec"), *place_faults(Path(out), moe, base)]
    try:
        source = Decomposed.open(Path(moe), None if base is None else Path(base))
    except InputError as error:
        raise InputError(*faults, *error.faults) from error
    raise_faults([*faults, *_rank_faults(config, source), *absence_faults(Path(moe))])
    progress = progress or Silent()
    cosines = _of_an_ancestor(source, minimum_cosine, progress)
    ranks = {} if config.energy is None else _ranks(source, config.energy, progress)
    work = _Work(source, config, ranks, seed)
    plan = work.plan()
    _write(Path(out), work, plan, max_shard_bytes=max_shard_bytes, progress=progress)
    return CompressionReport(
        base="mean" if base is None else "seed",
        delta=work.delta(),
        universal=source.universal,
        bytes_on_disk=weight_bytes(Path(out)),
        bytes_by_formula=work.bytes_by_formula(plan),
        bytes_of_original=weight_bytes(Path(moe)),
        parameters=work.parameters(plan),
        cosines=cosines,
        relative_errors=dict(work.errors),
    )


def _write(
    out: Path, work: "_Work", plan: Plan, *, max_shard_bytes: int, progress: Progress
) -> None:
    with new_directory(out) as folder:
        write_model(
            folder,
            plan,
            work.config_json(),
            source=work.source.moe,
            max_shard_bytes=max_shard_bytes,
            what="compression",
            progress=progress,
        )
        write_code(folder)
        write_checksums(folder)


@dataclass
class _Work:
    """Encoding, one matrix of all experts at a time.

    Args:
        source: The MoE.
        config: How deltas are stored.
        ranks: "LAYER.MATRIX" to rank, where a share of energy decides it.
        seed: Decides what is drawn.
        errors: "LAYER.MATRIX" to relative error, of what was encoded so far.
    """

    source: Decomposed
    config: CodecConfig
    ranks: Mapping[str, int]
    seed: int
    errors: dict[str, float] = field(default_factory=dict)
    _held: tuple[str, dict[str, Tensor]] = ("", {})

    def codec(self, layer: int, matrix: str) -> Codec:
        return codec_of(self.config, rank=self.ranks.get(f"{layer}.{matrix}"))

    def delta(self) -> dict[str, Any]:
        """What config.json says of the deltas."""
        if not self.ranks:
            return codec_of(self.config).settings
        largest = codec_of(self.config, rank=max(self.ranks.values())).settings
        return {**largest, "ranks": dict(self.ranks)}

    def plan(self) -> Plan:
        source, plan = self.source, Plan()
        for name, shape in source.family.tensors(source.dense).items():
            if not source.family.is_ffn(name):
                plan[ders_name(name)] = shape, source.dtype, partial(source.moe.tensor, name)
                continue
            plan |= self._matrix(*ffn_place(name))
        return plan

    def _matrix(self, layer: int, matrix: str) -> Plan:
        """Base and deltas of one matrix; before the first of an FFN, the router."""
        source, prefix = self.source, mlp_name(layer)
        shape, dtype, plan = source.matrices[matrix], source.dtype, Plan()
        if matrix == next(iter(source.matrices)):
            router = source.target.router_name(layer)
            whole = source.moe.tensors[router].shape
            plan[f"{prefix}.gate.weight"] = whole, dtype, partial(source.moe.tensor, router)
        own = partial(source.base, layer, matrix)
        plan[f"{prefix}.base.{matrix}.weight"] = shape, dtype, own
        layout = self.codec(layer, matrix).layout(source.count, shape, dtype)
        for part, (sizes, kind) in layout.items():
            encoded = partial(self._encoded, layer, matrix, part)
            plan[f"{prefix}.experts.{matrix}.{part}"] = sizes, kind, encoded
        return plan

    def _encoded(self, layer: int, matrix: str, part: str) -> Tensor:
        """One of the tensors of a matrix's deltas; all of them are held until the next matrix."""
        place = f"{layer}.{matrix}"
        if self._held[0] != place:
            self._held = "", {}
            codec, deltas_DOI = self.codec(layer, matrix), self.source.deltas(layer, matrix)
            key = (self.seed, layer, matrix)
            tensors = codec.encode(deltas_DOI, dtype=self.source.dtype, key=key)
            self.errors[place] = _relative_error(codec, tensors, deltas_DOI)
            self._held = place, tensors
        return self._held[1][part]

    def config_json(self) -> dict[str, Any]:
        source, config = self.source, self.source.moe.config
        return {
            **ARCHITECTURE,
            "dense": dict(source.dense),
            "num_experts": source.experts,
            "num_experts_per_tok": experts_of(config)[1],
            "moe_layers": list(range(source.layers)),
            "universal": "delta" if source.universal else "none",
            "combine": "normalised" if normalises(config) else "sum",
            "delta": self.delta(),
            "dtype": str(source.dtype).removeprefix("torch."),
            # Tokenizer loading branches on it, and the tokenizer is the experts' own.
            "transformers_version": config.get("transformers_version"),
        }

    def bytes_by_formula(self, plan: Plan) -> int:
        """Of the whole file: FFNs by ``ffn_bits``, the rest as it is."""
        source, width = self.source, self.source.dtype.itemsize
        total = float(sum(width * prod(shape) for shape in _outside(plan)))
        for layer in range(source.layers):
            ranks = {m: self.ranks[f"{layer}.{m}"] for m in source.matrices if self.ranks}
            bits = ffn_bits(
                source.matrices, source.count, self.config, value_bits=8 * width, ranks=ranks
            )
            total += bits / 8
        return round(total)

    def parameters(self, plan: Plan) -> int:
        """Numbers that are stored, without indices and scales."""
        total = sum(prod(shape) for shape in _outside(plan))
        for layer in range(self.source.layers):
            for matrix, shape in self.source.matrices.items():
                codec = self.codec(layer, matrix)
                total += prod(shape) + codec.entries(self.source.count, shape)
        return total


def _of_an_ancestor(source: Decomposed, minimum: float, progress: Progress) -> dict[str, float]:
    """The cosine of each expert's matrix and the base's, by "LAYER.EXPERT.MATRIX".

    Raises:
        InputError: The base is no ancestor of the experts.
    """
    cosines: dict[str, float] = {}
    progress.start("comparison with the base", source.layers * len(source.matrices), "matrices")
    for layer in range(source.layers):
        for matrix in source.matrices:
            base_OI = source.base(layer, matrix)
            for expert in range(source.count):
                weight_OI = source.weight(layer, expert, matrix)
                cosines[f"{layer}.{expert}.{matrix}"] = cosine(weight_OI, base_OI)
            progress.advance()
    raise_faults(ancestor_faults(source, cosines, minimum))
    return cosines


def _ranks(source: Decomposed, energy: float, progress: Progress) -> dict[str, int]:
    """The largest rank that an expert's share of energy needs, by "LAYER.MATRIX"."""
    ranks: dict[str, int] = {}
    progress.start("ranks of the deltas", source.layers * len(source.matrices), "matrices")
    for layer in range(source.layers):
        for matrix in source.matrices:
            base_OI = source.base(layer, matrix)
            ranks[f"{layer}.{matrix}"] = max(
                rank_of_energy(source.weight(layer, expert, matrix) - base_OI, energy)
                for expert in range(source.count)
            )
            progress.advance()
    return ranks


def _rank_faults(config: CodecConfig, source: Decomposed) -> list[Fault]:
    largest = min(source.matrices[next(iter(source.matrices))])
    if config.rank is None or config.rank <= largest:
        return []
    shape = " by ".join(map(str, source.matrices[next(iter(source.matrices))]))
    remedy = f"is above the matrices, {shape}; use at most {largest}"
    return [Fault("codec.rank", config.rank, remedy)]


def _relative_error(codec: Codec, tensors: Mapping[str, Tensor], deltas_DOI: Tensor) -> float:
    """||delta - decoded|| / ||delta|| over all experts; 0 if there is nothing to be lost."""
    lost, whole = 0.0, 0.0
    for expert, delta_OI in enumerate(deltas_DOI):
        decoded_OI = codec.decode(tensors, tuple(delta_OI.shape), expert)
        lost += float((decoded_OI - delta_OI).double().square().sum())
        whole += float(delta_OI.double().square().sum())
    return (lost / whole) ** 0.5 if whole else 0.0


def _outside(plan: Plan) -> Iterator[tuple[int, ...]]:
    """Shapes of what is neither base nor delta."""
    inside = (".mlp.base.", ".mlp.experts.")
    return (entry[0] for name, entry in plan.items() if not any(part in name for part in inside))
