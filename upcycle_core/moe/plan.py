"""What a MoE's checkpoint is made of: dense checkpoints that fit, and the source of each tensor.

H hidden size, D experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import Family
from upcycle_core.architectures.headers import tensor_faults
from upcycle_core.architectures.resolve import with_vocabulary_of
from upcycle_core.backbone.average import average_tensors
from upcycle_core.backbone.write import Plan, common_config, common_type, type_faults
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.writer import Produced
from upcycle_core.errors import Fault

Part = Literal["gate", "up", "down"]
Edit = Callable[[int, int, Part, torch.Tensor], torch.Tensor]
"""(layer, expert, which matrix, its weight) to the weight that is written in its place. The weight
is a view of the expert's file and not to be written to."""


@dataclass(frozen=True)
class Parts:
    """The dense checkpoints that become one MoE.

    Args:
        family: Their family.
        experts: One a domain, in order; copies of one model are one reader, several times.
        shared: Where the rest comes from: the backbone, or the checkpoints whose mean it is.
    """

    family: Family
    experts: Sequence[CheckpointReader]
    shared: Sequence[CheckpointReader]

    @classmethod
    def open(cls, experts: Mapping[str, Path], backbone: Path | None) -> "Parts":
        """Read configurations and headers.

        Args:
            experts: Domain to its expert's checkpoint.
            backbone: What ``write_backbone`` wrote; None for the mean of the experts, each
                checkpoint counted once.

        Raises:
            InputError: A checkpoint that cannot be read, or of no supported family.
        """
        opened: dict[Path, CheckpointReader] = {}
        for domain, path in experts.items():
            if path not in opened:
                opened[path] = CheckpointReader(path, field=f"experts.{domain}")
        shared = list(opened.values())
        if backbone is not None:
            shared = [CheckpointReader(backbone, field="backbone")]
        family = family_of(shared[0].config, field=f"{shared[0].field}.config.model_type")
        return cls(family, [opened[path] for path in experts.values()], shared)

    @property
    def config(self) -> Mapping:
        """The dense config.json that everything must fit."""
        return common_config(self.shared)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return common_type(self.shared)

    def shared_values(self, name: str) -> Produced:
        """A tensor outside the experts: the backbone's own, or the experts' mean."""
        if len(self.shared) == 1:
            return self.shared[0].pieces(name)
        return average_tensors(self.shared, name)

    def own_tensor(self, reader: CheckpointReader, name: str) -> torch.Tensor:
        """An expert's tensor, in the type of the weights."""
        return reader.tensor(name).to(self.dtype)

    def own_values(self, reader: CheckpointReader, name: str) -> Produced:
        """The same for another file, as it lies in its own where that has the type."""
        if reader.tensors[name].dtype == self.dtype:
            return reader.pieces(name)
        return self.own_tensor(reader, name)

    def faults(self) -> list[Fault]:
        """What speaks against joining them: tensors that do not fit, types that hold less."""
        faults = []
        if self.shared[0] not in self.experts:
            faults += tensor_faults(self.shared[0], self.family, self.shared[0].field, ffn=False)
        apart = self.shared[0] not in self.experts
        for reader in dict.fromkeys(self.experts):
            # A backbone brings its own embedding: the experts' may be of another vocabulary.
            config = with_vocabulary_of(self.config, reader.config) if apart else self.config
            faults += tensor_faults(reader, self.family, reader.field, config=config)
            faults += type_faults(reader, self.shared[0]) if apart else []
        return faults


def moe_plan(parts: Parts, routers: Mapping[int, torch.Tensor], edit: Edit | None = None) -> Plan:
    """Plan the checkpoint of the family's stock MoE.

    Args:
        parts: Where tensors come from.
        routers: Layer to W [H, D].
        edit: Applied to the experts' matrices on their way.
    """
    family = parts.family
    dense = family.tensors(parts.config)
    layer_of = {name: i for i in range(len(routers)) for name in family.ffn(i)}
    plan: Plan = {}
    for name, shape in dense.items():
        if name not in layer_of:
            plan[name] = shape, parts.dtype, partial(parts.shared_values, name)
        elif name == family.ffn(layer_of[name]).gate:
            layer = layer_of[name]
            plan |= _moe_layer(parts, layer, routers[layer], edit)
    return plan


def _moe_layer(parts: Parts, layer: int, router_HD: torch.Tensor, edit: Edit | None) -> Plan:
    """The tensors of one MoE block: router, what must be zero, experts."""
    family, target, dtype = parts.family, parts.family.target, parts.dtype
    router_DH = router_HD.T
    plan: Plan = {target.router_name(layer): (router_DH.shape, dtype, partial(router_DH.to, dtype))}
    for name, shape in family.zeros(parts.config, layer, experts=len(parts.experts)).items():
        plan[name] = shape, dtype, partial(torch.zeros, shape, dtype=dtype)
    kinds: tuple[Part, ...] = ("gate", "up", "down")
    for index, reader in enumerate(parts.experts):
        names = zip(kinds, family.ffn(layer), target.expert_ffn(layer, index), strict=True)
        for part, old, new in names:
            source: Callable[[], Produced] = partial(parts.own_values, reader, old)
            if edit is not None:
                read = partial(parts.own_tensor, reader, old)
                source = partial(_edited, edit, (layer, index, part), read, dtype)
            plan[new] = reader.tensors[old].shape, dtype, source
    return plan


def _edited(
    edit: Edit, place: tuple[int, int, Part], read: Callable[[], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    return edit(*place, read()).to(dtype)
