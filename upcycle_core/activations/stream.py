"""A decoder over a whole text, layer by layer: one layer's weights at a time.

Each layer is the stock class's own, called as the stock model calls it, so that a batch becomes bit
for bit what the whole model makes of it.

Shapes: B paragraphs a batch, S tokens a paragraph, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig

from upcycle_core.architectures.family import EMBEDDING

Read = Callable[[str], Tensor]
"""A checkpoint's tensor by its name."""
LAYER = "model.layers.{layer}."


@dataclass
class Passing:
    """A batch on its way through the layers.

    Args:
        hidden_BSH: The residual stream before the next layer.
        calls: What the model gives each layer beside it: positions, masks.
    """

    hidden_BSH: Tensor
    calls: list[Mapping[str, Any]]


class LayerStream:
    """A dense decoder without lm_head whose weights are read when their layer is next.

    Args:
        directory: Where config.json lies.
        read: Where weights come from.
        dtype: Type that they get.
        device: Where they go.
    """

    def __init__(
        self, directory: Path, read: Read, *, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        kind: Any = MODEL_MAPPING[type(config)]
        with init_empty_weights(include_buffers=False):
            self.model = kind._from_config(config, dtype=dtype).eval()
        self.model.rotary_emb.to(device)
        self._read, self._dtype, self._device = read, dtype, device

    def start(self, batches: list[Tensor]) -> list[Passing]:
        """Batches [B, S] int64 of token ids before the first layer."""
        embedding = {"weight": self._tensor(EMBEDDING)}
        self.model.embed_tokens.load_state_dict(embedding, assign=True)
        with torch.inference_mode():
            found = [self._start(ids.to(self._device)) for ids in batches]
        self.model.embed_tokens.to("meta")
        return found

    def _start(self, ids_BS: Tensor) -> Passing:
        """Let the stock model call its layers, which only write down what they are given."""
        passing: list[Passing] = []
        calls: list[Mapping[str, Any]] = []

        def note(hidden_BSH: Tensor, **given: Any) -> Tensor:
            passing.append(Passing(hidden_BSH, calls))
            calls.append(given)
            return hidden_BSH

        layers, norm = self.model.layers, self.model.norm
        try:
            for layer in layers:
                layer.forward = note
            self.model.norm = nn.Identity()
            self.model(input_ids=ids_BS, use_cache=False)
        finally:
            self.model.norm = norm
            for layer in layers:
                del layer.forward
        return passing[0]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Within this context the layer has its weights."""
        layer = self.model.layers[index]
        prefix = LAYER.format(layer=index)
        names = layer.state_dict()
        layer.load_state_dict({n: self._tensor(prefix + n) for n in names}, assign=True)
        try:
            with torch.inference_mode():
                yield layer
        finally:
            layer.to("meta")

    def through(self, index: int, layer: nn.Module, batch: Passing) -> Tensor:
        """What the layer makes of a batch, [B, S, H]."""
        return layer(batch.hidden_BSH, **batch.calls[index])

    def _tensor(self, name: str) -> Tensor:
        return self._read(name).to(self._device, self._dtype)
