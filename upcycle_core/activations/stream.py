"""A decoder over a whole text, layer by layer: one layer's weights at a time.

Each layer is the stock class's own, and the stock model calls it, so that a batch becomes bit for
bit what the whole model makes of it.

Shapes: B paragraphs a batch, S tokens a paragraph, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from upcycle_core.architectures.families import STOCK_MOES
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.checkpoints.fused import StockTensors
from upcycle_core.checkpoints.load import choose_experts_implementation
from upcycle_core.checkpoints.reader import CheckpointReader

Read = Callable[[str], Tensor]
"""A checkpoint's tensor by its name."""
LAYER = "model.layers.{layer}."
NORM = "model.norm.weight"


@dataclass
class Passing:
    """A batch on its way through the layers.

    Args:
        hidden_BSH: The residual stream before the next layer.
        mask_BS: 1 on tokens; None where nothing is told of padding.
    """

    hidden_BSH: Tensor
    mask_BS: Tensor | None = None


class LayerStream:
    """A decoder without lm_head whose weights are read when their layer is next.

    Args:
        directory: Where config.json lies.
        read: Where weights come from; of a stock MoE None: from there, each layer's experts put
            together when it is their turn.
        dtype: Type that they get.
        device: Where they go.
        beside: Other checkpoints that ``read`` takes weights of.

    Attributes:
        model: The stock class's instance, its weights on no device but those of the layer at work.
    """

    def __init__(
        self,
        directory: Path,
        read: Read | None,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        beside: Sequence[Path] = (),
    ) -> None:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        kind: Any = transformers.MODEL_MAPPING[type(config)]
        options: dict[str, Any] = {}
        if config.model_type in STOCK_MOES:
            precision: Literal["fp32", "bf16"] = "bf16" if dtype == torch.bfloat16 else "fp32"
            options["experts_implementation"] = choose_experts_implementation(device, precision)
        with torch.device("meta"):
            self.model = kind._from_config(config, dtype=dtype, **options).eval()
        self._wide = frozenset(self.model._keep_in_fp32_modules_strict or ())
        """Parts of names that the stock class keeps in fp32."""
        # Its angles are in no file.
        self.model.rotary_emb = type(self.model.rotary_emb)(config=config).to(device)
        self.model.requires_grad_(False)
        self._norm, self.model.norm = self.model.norm, nn.Identity()
        for layer in self.model.layers:
            layer.forward = _unchanged
        self._places: dict[str, Tensor] = {}
        """Where each layer's experts lie, as those of the layer before lay. Freed and allocated
        anew they would not: a little of what is freed goes to others, and then they do not fit."""
        self._read = read or self._reading_moe(directory, dtype)
        self.dtype, self.device = dtype, device
        self._sources = [Path(directory), *map(Path, beside)]

    @property
    def stamp(self) -> list[list[Any]]:
        """Name, size and time of change of each file of weights: other files are other weights."""
        files = [f for source in self._sources for f in sorted(source.glob("*.safetensors"))]
        return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]

    def _reading_moe(self, directory: Path, dtype: torch.dtype) -> Read:
        reader = CheckpointReader(directory, field="model")
        stock = StockTensors(reader, self.model)

        def read(name: str) -> Tensor:
            own = name.removeprefix("model.")
            if own not in stock.sources:
                return reader.tensor(name)
            _, _, part = own.removeprefix("layers.").partition(".")
            found = stock.tensor(own, dtype, out=self._places.get(part))
            if stock.is_fused(own):
                self._places[part] = found
            return found

        return read

    @property
    def layers(self) -> int:
        """L."""
        return int(self.model.config.num_hidden_layers)

    def start(self, batches: list[Tensor]) -> list[Passing]:
        """Batches [B, S] int64 of token ids before the first layer."""
        with self.embedding():
            return [Passing(self.embedded(ids)) for ids in batches]

    @contextmanager
    def embedding(self) -> Iterator[None]:
        """Within this context tokens can be embedded."""
        weight = {"weight": self.tensor(EMBEDDING)}
        self.model.embed_tokens.load_state_dict(weight, assign=True)
        try:
            with torch.inference_mode():
                yield
        finally:
            self.model.embed_tokens.to("meta")

    def embedded(self, ids_BS: Tensor) -> Tensor:
        """What the first layer reads of token ids, [B, S, H]."""
        return self.model(input_ids=ids_BS.to(self.device), use_cache=False).last_hidden_state

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Within this context the layer has its weights."""
        layer = self.model.layers[index]
        prefix = LAYER.format(layer=index)
        names = layer.state_dict()
        layer.load_state_dict({n: self.tensor(prefix + n) for n in names}, assign=True)
        del layer.forward
        try:
            with torch.inference_mode():
                yield layer
        finally:
            layer.forward = _unchanged
            layer.to("meta")

    def through(self, batch: Passing) -> Tensor:
        """What the layer that has its weights makes of a batch, [B, S, H].

        The stock model is called with all layers; those without weights hand on what they get.
        """
        return self.model(
            inputs_embeds=batch.hidden_BSH, attention_mask=batch.mask_BS, use_cache=False
        ).last_hidden_state

    def final_norm(self) -> nn.Module:
        """The norm behind the last layer, with its weights."""
        self._norm.load_state_dict({"weight": self.tensor(NORM)}, assign=True)
        return self._norm

    def head(self) -> Tensor:
        """The matrix [V, H] that makes logits: a tied model's embedding. Layers are done then."""
        self._places.clear()
        return self.tensor(EMBEDDING if self.model.config.tie_word_embeddings else LM_HEAD)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model, in its type and place."""
        is_wide = self.dtype == torch.bfloat16 and any(part in name for part in self._wide)
        return self._read(name).to(self.device, torch.float32 if is_wide else self.dtype)


def _unchanged(hidden_BSH: Tensor, **_: Any) -> Tensor:
    """What a layer without weights hands on."""
    return hidden_BSH
