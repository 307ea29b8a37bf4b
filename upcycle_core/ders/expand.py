"""A DeRS model as the stock MoE that computes the same: W_i = W_base + delta_i.

N experts, D deltas of a matrix, [O, I] a matrix.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from upcycle_core.architectures.families import QWEN2_MOE, family_of
from upcycle_core.architectures.family import LM_HEAD, Family
from upcycle_core.backbone.write import Plan, write_model
from upcycle_core.checkpoints.place import new_directory, place_faults
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.ders.codec import stored_codec
from upcycle_core.ders.config import CodecConfig
from upcycle_core.ders.decompose import MATRICES, SHARED, SHARED_GATE
from upcycle_core.ders.files import ders_name, ffn_place, mlp_name, verify
from upcycle_core.ders.model import DersConfig, DersForCausalLM
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.progress import Progress


def expand(
    compressed: Path,
    out: Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> None:
    """Write the stock MoE (Mixtral, Qwen2Moe, Qwen3Moe) of a DeRS model.

    One matrix of one expert is made at a time, in fp32, and rounded to the model's type. ``out``
    appears when it is complete. A universal FFN U becomes a Qwen2Moe's shared expert, which its
    gate of zeros weighs by one half; its down matrix is twice U's.

    Args:
        compressed: What ``compress`` or ``write_ders_upcycling`` wrote, trained or not.
        out: The directory that is written.
        max_shard_bytes, progress: As for ``write_model``.

    Raises:
        InputError: A file that is missing or altered, tensors that do not fit, a model that no
            stock architecture expresses: dense layers, another family, outputs combined in
            another way.
    """
    faults = place_faults(Path(out), compressed)
    try:
        verify(Path(compressed), field="compressed")
        source = _Compressed.open(Path(compressed))
    except InputError as error:
        raise InputError(*faults, *error.faults) from error
    raise_faults([*faults, *source.tensor_faults()])
    with new_directory(Path(out)) as folder:
        write_model(
            folder,
            source.plan(),
            source.stock_config(),
            source=source.reader,
            max_shard_bytes=max_shard_bytes,
            what="expansion",
            progress=progress,
        )


def expanded_bytes(compressed: Path) -> int:
    """How much the weights of the stock MoE of a DeRS model take, in bytes.

    Raises:
        InputError: As of ``expand``.
    """
    plan = _Compressed.open(Path(compressed)).plan()
    return sum(prod(shape) * dtype.itemsize for shape, dtype, _ in plan.values())


@dataclass(frozen=True)
class _Compressed:
    """A DeRS checkpoint that a stock architecture can express.

    Args:
        reader: The checkpoint.
        family: The dense model's.
        dense: The content of its config.json.
    """

    reader: CheckpointReader
    family: Family
    dense: Mapping

    @classmethod
    def open(cls, compressed: Path) -> "_Compressed":
        reader = CheckpointReader(compressed, field="compressed", integers=True)
        config = reader.config
        if config.get("model_type") != "ders":
            remedy = "is no DeRS model; give what compress or DeRS upcycling wrote"
            raise InputError(
                Fault("compressed.config.model_type", config.get("model_type"), remedy)
            )
        family = family_of(config["dense"], field="compressed.config.dense.model_type")
        raise_faults(_stock_faults(config, family))
        return cls(reader, family, config["dense"])

    @property
    def experts(self) -> int:
        """N."""
        return self.reader.config["num_experts"]

    @property
    def count(self) -> int:
        """D."""
        return self.experts + (self.universal == "delta")

    @property
    def universal(self) -> str:
        return self.reader.config["universal"]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.reader.tensors["model.decoder.embed_tokens.weight"].dtype

    def tensor_faults(self) -> Iterator[Fault]:
        """Account for every tensor."""
        with torch.device("meta"):
            model = DersForCausalLM(DersConfig.from_dict(deepcopy(dict(self.reader.config))))
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = bool(self.family.resolve(self.dense)["tie_word_embeddings"])
        if tied:
            del expected[LM_HEAD]
        place, found = str(self.reader.directory), self.reader.tensors
        for name, shape in expected.items():
            if name not in found or found[name].shape != shape:
                remedy = f"lacks tensor {name} of shape {list(shape)}; write the model again"
                yield Fault("compressed", place, remedy)
        for name in found:
            if name not in expected and not (name == LM_HEAD and tied):
                remedy = f"holds {name}, which its configuration has no place for"
                yield Fault("compressed", place, remedy)

    def weight(self, layer: int, expert: int, matrix: str) -> Tensor:
        """A matrix of one expert, or (``expert`` N) of the universal FFN as a shared expert."""
        mlp, universal = mlp_name(layer), expert == self.experts
        if universal and self.universal == "own":
            weight_OI = self.reader.tensor(f"{mlp}.universal.{matrix}.weight")
        else:
            base_OI = self.reader.tensor(f"{mlp}.base.{matrix}.weight")
            codec = stored_codec(self.reader.config["delta"], layer, matrix)
            shape = (base_OI.shape[0], base_OI.shape[1])
            parts = codec.layout(self.count, shape, self.dtype)
            read = {part: self.reader.tensor(f"{mlp}.experts.{matrix}.{part}") for part in parts}
            weight_OI = base_OI + codec.decode(read, shape, expert)
        doubled = universal and matrix == MATRICES[-1]
        return (2 * weight_OI if doubled else weight_OI).to(self.dtype)

    def plan(self) -> Plan:
        """The stock MoE's tensors."""
        plan: Plan = {}
        for name, shape in self.family.tensors(self.dense).items():
            if not self.family.is_ffn(name):
                plan[name] = shape, self.dtype, partial(self.reader.tensor, ders_name(name))
            elif name.endswith(f".{MATRICES[0]}.weight"):
                plan |= self._layer(ffn_place(name)[0])
        return plan

    def _layer(self, layer: int) -> Plan:
        """Router, shared expert and experts, as ``moe.plan`` orders them."""
        target, hidden = self.family.target, self.dense["hidden_size"]
        router = partial(self.reader.tensor, f"{mlp_name(layer)}.gate.weight")
        plan: Plan = {target.router_name(layer): ((self.experts, hidden), self.dtype, router)}
        mlp, tensors = mlp_name(layer), self.reader.tensors
        shapes = {m: tensors[f"{mlp}.base.{m}.weight"].shape for m in MATRICES}
        zeros_of = self.family.zeros(self.dense, layer, experts=self.experts)
        for name, shape in zeros_of.items():
            if self.universal == "none" or name == SHARED_GATE.format(layer=layer):
                zeros = partial(torch.zeros, shape, dtype=self.dtype)
                plan[name] = shape, self.dtype, zeros
        owners = {e: tuple(target.expert_ffn(layer, e)) for e in range(self.experts)}
        if self.universal != "none":
            owners[self.experts] = tuple(SHARED.format(layer=layer, matrix=m) for m in MATRICES)
        for expert, names in owners.items():
            for matrix, name in zip(MATRICES, names, strict=True):
                source = partial(self.weight, layer, expert, matrix)
                plan[name] = shapes[matrix], self.dtype, source
        return plan

    def stock_config(self) -> dict:
        """The stock MoE's config.json."""
        config, target = self.reader.config, self.family.target
        content = self.family.target_config(
            self.dense,
            experts=self.experts,
            top_k=config["num_experts_per_tok"],
            dtype=self.dtype,
        )
        if not target.always_normalises:
            content["norm_topk_prob"] = config["combine"] == "normalised"
        if self.universal != "none":
            content["shared_expert_intermediate_size"] = self.dense["intermediate_size"]
        return content | {"transformers_version": config.get("transformers_version")}


def _stock_faults(config: Mapping, family: Family) -> Iterator[Fault]:
    """Why no stock architecture computes what this model does."""
    yield from family.config_faults(config["dense"], "compressed")
    settings = {name: value for name, value in config["delta"].items() if name != "ranks"}
    yield from CodecConfig(**settings).faults("compressed.config.delta")
    stock, layers = family.target.architecture, config["dense"]["num_hidden_layers"]
    if sorted(config["moe_layers"]) != list(range(layers)):
        remedy = f"{stock} has experts in every layer, 0 to {layers - 1}; run it as it is"
        yield Fault("compressed.config.moe_layers", config["moe_layers"], remedy)
    combine, universal = config["combine"], config["universal"]
    if universal != "none" and family.target is not QWEN2_MOE:
        remedy = f"{stock} has no universal FFN; run it as it is"
        yield Fault("compressed.config.universal", universal, remedy)
    elif universal != "none" and combine != "sum":
        remedy = f"{stock} adds its shared expert whatever the router says; run it as it is"
        yield Fault("compressed.config.combine", combine, remedy)
    elif combine == "sum" and family.target.always_normalises:
        remedy = f"{stock} always divides weights by their sum; run it as it is"
        yield Fault("compressed.config.combine", combine, remedy)
