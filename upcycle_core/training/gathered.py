"""A model that workers hold in parts, written as an ordinary checkpoint, tensor by tensor."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from upcycle_core.checkpoints.writer import TensorSpec, write_sharded
from upcycle_core.training import workers

SHARD_BYTES = 5_000_000_000


def write_gathered(network: PreTrainedModel, out: Path) -> None:
    """Write weights and configurations as ``save_pretrained`` does; all workers must call.

    Worker 0 writes. Nobody holds more than one tensor whole; of fused experts, their tensor.
    """
    source = Source(network)
    if workers.rank() != 0:
        for spec in source.specs:
            source.tensor(spec.name)
        return
    out.mkdir(parents=True, exist_ok=True)
    network.config.dtype = str(network.dtype).removeprefix("torch.")
    network.config.architectures = [type(network).__name__.removeprefix("FSDP")]
    network.config.save_pretrained(out)
    network.generation_config.save_pretrained(out)
    write_sharded(out, source.specs, source.tensor, max_shard_bytes=SHARD_BYTES)
    own: Any = network
    if hasattr(own, "write_beside"):  # a model with code of its own
        own.write_beside(out)


class Source:
    """The tensors of a divided network under the names that its files have.

    Args:
        network: Tied parameters are written once.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        self._network = network
        parameters: dict[str, Tensor] = dict(network.named_parameters())
        every = {name for name, _ in network.named_parameters(remove_duplicate=False)}
        buffers = {n: t for n, t in network.state_dict().items() if n not in every}
        self._state = parameters | buffers
        self._made_of: dict[str, str] = {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        self.specs: list[TensorSpec] = []
        for name, tensor in self._state.items():
            shapes = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for own, part in self._as_in_files(name, shapes).items():
                self._made_of[own] = name
                self.specs.append(TensorSpec(own, tuple(part.shape), part.dtype))

    def tensor(self, name: str) -> Tensor:
        """One of the tensors, on the CPU; all workers must ask, in the same order."""
        fused = self._made_of[name]
        if self._last[0] != fused:
            self._last = ("", {})  # freed before the next is gathered
            whole = workers.whole(self._state[fused].detach()).cpu()
            self._last = (fused, self._as_in_files(fused, whole))
        return self._last[1][name].contiguous()

    def _as_in_files(self, name: str, tensor: Any) -> dict[str, Tensor]:
        return revert_weight_conversion(self._network, {name: tensor})
