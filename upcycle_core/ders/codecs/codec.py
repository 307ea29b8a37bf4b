"""What every codec does: deltas of one matrix to the tensors of a file, and back.

D deltas of a matrix [O, I]: O output size, I input size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from upcycle_core.ders.model.deltas_ders import Delta, make_delta

Shape = tuple[int, int]
"""[O, I] of a matrix."""
Key = tuple[int | str, ...]
"""What random choices depend on, and on nothing else: (seed, layer, matrix)."""


class Codec(ABC):
    """A way to store deltas.

    How tensors are laid out and what they mean is said once, by the module that the model computes
    with (``deltas_ders``); a codec fills them.
    """

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What config.json says of it: ``codec`` and the settings that its tensors depend on."""

    @abstractmethod
    def encode(self, deltas_DOI: Tensor, *, dtype: torch.dtype, key: Key) -> dict[str, Tensor]:
        """Return the tensors that stand for ``deltas_DOI``, as ``layout`` has them.

        Args:
            deltas_DOI: fp32 or fp64, one delta an expert.
            dtype: Type of what is stored as floating point.
            key: Decides what is drawn, with the expert's place.
        """

    @abstractmethod
    def bits(self, deltas: int, shape: Shape, *, value_bits: int) -> int:
        """Exact size of D deltas of a matrix in bits; ``value_bits``: of a floating point one."""

    @abstractmethod
    def entries(self, deltas: int, shape: Shape) -> int:
        """Numbers that are stored of the deltas themselves: no indices, no scales."""

    def layout(
        self, deltas: int, shape: Shape, dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name to shape and type of every tensor, in the order they are written."""
        return {
            name: (tuple(tensor.shape), dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self._module(deltas, shape).state_dict().items()
        }

    def decode(self, tensors: Mapping[str, Tensor], shape: Shape, expert: int) -> Tensor:
        """Return one delta [O, I], in fp32, or fp64 if that is what is stored.

        Args:
            tensors: What ``encode`` returned, or a file holds.
            shape: [O, I].
            expert: Which of the D deltas.
        """
        own = {name: _exact(tensor[expert : expert + 1]) for name, tensor in tensors.items()}
        module = self._module(1, shape)
        module.load_state_dict(own, assign=True)
        with torch.no_grad():
            return module.dense(0)

    def _module(self, deltas: int, shape: Shape) -> Delta:
        """The module that reads the tensors, without storage."""
        with torch.device("meta"):
            return make_delta(deltas, *shape, bias=False, **self.settings)


def _exact(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
