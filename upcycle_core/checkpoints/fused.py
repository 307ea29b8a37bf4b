"""A MoE's experts as transformers' classes hold them: one tensor a layer, filled once.

transformers stacks a layer's gates, then its up projections, then puts both together: three copies
whose memory the next layers' do not fit into. Here the tensor is made at once, and each expert's
matrices are copied to their places from the mapped file.

Shapes: D experts, I intermediate size, H hidden size.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from upcycle_core.checkpoints.reader import CheckpointReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


class StockTensors:
    """A checkpoint's tensors under the names of the class that is to hold them.

    Args:
        reader: The checkpoint.
        model: The class's instance; its weights may be on no device. One without lm_head leaves the
            head out.

    Attributes:
        sources: {tensor of the model: the checkpoint's that it is made of}, in the order in which
            they follow each other along dimension 1, each a list of experts or of one.
        unplaced: Tensors of the checkpoint that have no place in the model, or none known here.
        broken: Tensors of the model whose sources are not as many, or not as large, as it takes.
    """

    def __init__(self, reader: CheckpointReader, model: "PreTrainedModel") -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self._reader = reader
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        mapping = get_model_conversion_mapping(model)
        renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
        converters = [step for step in mapping if isinstance(step, WeightConverter)]
        found: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.unplaced: list[str] = []
        self.broken: list[str] = []
        for name in sorted(reader.tensors, key=dot_natural_key):
            placed, pattern = rename_source_key(
                name, renamings, converters, model.base_model_prefix, self._shapes
            )
            if placed in self._shapes:
                found[placed][pattern].append(name)
            else:
                self.unplaced.append(name)
        self.sources: dict[str, Sequence[Sequence[str]]] = {}
        for placed, parts in found.items():
            if ordered := self._ordered(placed, parts, converters):
                self.sources[placed] = ordered
            elif placed not in self.broken:
                self.unplaced += [name for part in parts.values() for name in part]

    def _ordered(
        self,
        placed: str,
        parts: Mapping[str | None, list[str]],
        converters: "Sequence[WeightConverter]",
    ) -> Sequence[Sequence[str]] | None:
        """The sources of a tensor in their order; None where they make it in another way."""
        if None in parts:
            return [parts[None]] if len(parts) == len(parts[None]) == 1 else None
        own = next(c for c in converters if set(parts) <= set(c.source_patterns))
        if not _stacks(own):
            return None
        ordered = [parts.get(pattern, []) for pattern in own.source_patterns]
        experts, rows, *rest = self._shapes[placed]
        whole = all(len(part) == experts for part in ordered)
        for names in zip(*ordered, strict=False):
            shapes = [self._reader.tensors[name].shape for name in names]
            whole &= sum(shape[0] for shape in shapes) == rows
            whole &= all(list(shape[1:]) == rest for shape in shapes)
        if not whole:
            self.broken.append(placed)
        return ordered if whole else None

    def is_fused(self, name: str) -> bool:
        """Whether a tensor of the model is put together, of a layer's experts."""
        parts = self.sources[name]
        own = self._reader.tensors[parts[0][0]].shape
        return len(parts) > 1 or tuple(self._shapes[name]) != tuple(own)

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """A tensor of the model: a view of the mapped file, or a layer's experts [D, 2 I, H].

        Args:
            name: As the model has it.
            dtype: Type that experts which are put together get; the file's by default.
            out: Where experts are put, if it is of their shape and type; else they get memory of
                their own.
        """
        parts = self.sources[name]
        first = self._reader.tensor(parts[0][0])
        if not self.is_fused(name):
            return first
        shape, kind = self._shapes[name], dtype or first.dtype
        if out is None or (out.shape, out.dtype) != (shape, kind):
            out = torch.empty(shape, dtype=kind)
        fused_DRC = out
        for expert, names in enumerate(zip(*parts, strict=True)):
            row = 0
            for source in names:
                weight = self._reader.tensor(source)
                fused_DRC[expert, row : row + len(weight)] = weight
                row += len(weight)
        return fused_DRC


def _stacks(converter: "WeightConverter") -> bool:
    """Whether it puts experts upon each other, and what they are of side by side."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    stack, *rest = converter.operations
    if not (isinstance(stack, MergeModulelist) and stack.dim == 0):
        return False
    if len(converter.source_patterns) == 1:
        return not rest
    return len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1
