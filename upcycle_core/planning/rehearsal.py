"""Peak memory of a training step or a forward pass, by a rehearsal that computes nothing.

The real model class runs on fake tensors, which have shapes, types and lifetimes but no memory, and
what would be alive at once is added up. Only one and two layers are rehearsed: every further layer
costs what the second one does.
"""

import gc
import json
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from upcycle_core.planning.shape import Shape
from upcycle_core.precision import arithmetic, weights_type
from upcycle_core.training.config import (
    ExpertMethod,
    ExpertTrainingConfig,
    LoraSettings,
    TrainingConfig,
)
from upcycle_core.training.head import SLICE, HeadLoss
from upcycle_core.training.vocabulary import NUMBERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEPTHS = (1, 2)
"""Layers that are rehearsed."""
TOKENS = 1 << 14
"""Of a batch that is rehearsed as it is; slices of the head's, for a larger one, cost seconds."""
PER_LAYER = frozenset({"layer_types", "dtype", "torch_dtype", "architectures", "max_window_layers"})
"""Keys of config.json that name layers one by one, or say what is said otherwise here."""


def training_bytes(
    shape: Shape, config: TrainingConfig, *, device: str = "cpu", workers: int = 1
) -> int:
    """Bytes at the peak of a step: weights, gradients, AdamW's moments, activations.

    Args:
        shape: The dense model.
        config: How it is trained, whole or, as experts may be, in part; its batch and sequence
            length count.
        device: "cpu" or "cuda", where ``precision: auto`` is decided.
        workers: How many divide weights, gradients and moments; of each, the bytes.
    """
    expert = config if isinstance(config, ExpertTrainingConfig) else ExpertTrainingConfig()
    method = expert.method
    bf16 = arithmetic(config.precision, device) == "bf16"
    rehearsed = ExpertTrainingConfig(
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        gradient_accumulation=min(2, config.gradient_accumulation),
        gradient_checkpointing=config.gradient_checkpointing,
        method=method,
        lora=expert.lora,
    )
    described = json.dumps(dict(shape.config))

    def rehearse(rows: int) -> int:
        sized = replace(rehearsed, batch_size=rows)
        return _training_bytes(described, shape.layers, sized, bf16)

    peak = of_rows(rehearse, config, shape.vocabulary)
    trained = trained_parameters(shape, method)
    narrow = config.optimizer_state == "bf16"
    if narrow:
        peak -= 2 * 2 * trained
    if workers == 1:
        return peak
    each = 12 if narrow else 16  # weight, gradient, two moments
    held = each * trained + (2 if bf16 else 4) * (shape.whole - trained)
    # A layer is gathered with its gradient; states of all workers go to the rows of both ends.
    layer = (shape.whole - shape.ends) // shape.layers
    tokens = config.batch_size * config.sequence_length
    states = min(NUMBERS, workers * tokens * shape.hidden)
    return peak - held + held // workers + 4 * 2 * (layer + states)


@lru_cache
def _training_bytes(config: str, depth: int, training: ExpertTrainingConfig, bf16: bool) -> int:
    """Of one worker with moments in fp32, rehearsed once for all settings that are arithmetic."""
    frozen = torch.bfloat16 if bf16 else torch.float32

    def rehearse(layers: int) -> int:
        start = frozen if training.method == "lora" else torch.float32
        with FakeTensorMode(), Held() as held:
            network = _network(config, layers, start)
            if training.method == "lora":
                _adapt(network, training.lora or LoraSettings())
            elif training.method != "full":
                from upcycle_core.training.expert import freeze_others

                freeze_others(network, training.method, frozen)
            if training.gradient_checkpointing:
                network.activation_checkpointing_enable({"use_reentrant": False})
            network.train()
            step(network, training, held, bf16=bf16)
            return held.peak

    return extrapolated(rehearse, depth)


def of_rows(rehearse: Callable[[int], int], config: TrainingConfig, vocabulary: int) -> int:
    """What a batch costs; of a large one from two that are smaller, for a row more costs the same.

    Args:
        rehearse: Bytes at the peak, with so many rows.
        config: Batches.
        vocabulary: V, of which a slice of logits has as many tokens as it holds at once.
    """
    rows = max(1, max(TOKENS, 2 * SLICE // vocabulary) // config.sequence_length)
    more = config.batch_size - 2 * rows
    if more <= 0:
        return rehearse(config.batch_size)
    one, two = rehearse(rows), rehearse(2 * rows)
    return two + more * (two - one) // rows


def trained_parameters(shape: Shape, method: ExpertMethod) -> int:
    """Parameters of the model itself that a method trains; an adapter's are not counted."""
    return {
        "full": shape.whole,
        "layers": shape.whole - shape.ends,
        "ffn": shape.ffns,
        "lora": 0,
    }[method]


def forward_bytes(
    shape: Shape, tokens: tuple[int, int], *, precision: str, device: str = "cpu"
) -> int:
    """Bytes at the peak of a forward pass without the head, weights included.

    Args:
        shape: The dense model.
        tokens: Paragraphs of a batch, and tokens of a paragraph.
        precision: Type of the weights, as recipes name it.
        device: Where ``auto`` is decided.
    """
    dtype = weights_type(precision, device)  # type: ignore[arg-type]
    return _forward_bytes(json.dumps(dict(shape.config)), shape.layers, tokens, dtype)


@lru_cache
def _forward_bytes(config: str, depth: int, tokens: tuple[int, int], dtype: torch.dtype) -> int:
    """Rehearsed once for all who ask."""

    def rehearse(layers: int) -> int:
        with FakeTensorMode(), Held() as held, torch.no_grad():
            body = transformers.AutoModel.from_config(
                model_config(json.loads(config), layers), dtype=dtype
            )
            held.begin()
            body(input_ids=torch.zeros(tokens, dtype=torch.int64), use_cache=False)
            return held.peak

    return extrapolated(rehearse, depth)


def _network(config: str, layers: int, dtype: torch.dtype) -> "PreTrainedModel":
    """The model with so many layers, on fake tensors."""
    network: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
        model_config(json.loads(config), layers), dtype=dtype
    )
    return network


def model_config(config: Mapping[str, Any], layers: int) -> Any:
    """The configuration with so many layers."""
    values = {**config, "num_hidden_layers": layers}
    kept = {key: value for key, value in values.items() if key not in PER_LAYER}
    return AutoConfig.for_model(kept.pop("model_type"), **kept)


def step(
    network: "PreTrainedModel",
    config: TrainingConfig,
    held: "Held",
    *,
    bf16: bool,
    coefficients: Tensor | None = None,
) -> None:
    """A micro-batch that finds moments in place, and gradients if it is not the first.

    The fused optimizer makes no temporaries, so its step is never the peak; it is taken once before
    to have its states.

    Args:
        network: On fake tensors.
        config: Batches.
        held: What counts.
        bf16: Whether it is computed in bf16.
        coefficients: Of a SIMoE's experts.
    """
    model: Any = network
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if config.gradient_accumulation == 1:
        optimizer.zero_grad()
    ids = torch.zeros(config.batch_size, config.sequence_length, dtype=torch.int64)
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext()
    loss: Any
    head: Any = network.get_output_embeddings()
    body, mixed = model.base_model, nullcontext()
    if coefficients is not None:
        body, mixed = model.model.base_model, model.mixture.using(coefficients)
    held.begin()
    with cast, mixed:
        hidden_BSH = body(input_ids=ids, use_cache=False).last_hidden_state
        if type(head) is nn.Linear:
            loss = HeadLoss.apply(hidden_BSH.flatten(0, 1), head.weight, ids.flatten(), True)
        else:  # it has experts, and makes whole logits
            loss = model.loss_function(head(hidden_BSH), ids, head.out_features)
    loss.backward()


class _Adapted(nn.Module):
    """A linear layer with an adapter beside it; peft's own cannot be made of fake tensors."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """W x + B A x, A and B in fp32 as peft has them."""
        return self.base(x) + self.b(self.a(x.float()))


def _adapt(network: "PreTrainedModel", settings: LoraSettings) -> None:
    network.requires_grad_(False)
    ends = tuple(f".{name}" for name in settings.modules)  # self_attn.q_proj is one as well
    for path, parent in list(network.named_modules()):
        for name, child in list(parent.named_children()):
            if f".{path}.{name}".endswith(ends) and isinstance(child, nn.Linear):
                setattr(parent, name, _Adapted(child, settings.rank))


class Held(TorchDispatchMode):
    """Bytes of all storages that operations inside have made and that are still there.

    Attributes:
        now: At this moment.
        peak: At most, since ``begin``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def begin(self) -> None:
        """Forget the peak of before, and what nothing holds any more."""
        gc.collect()
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._keep(tensor.untyped_storage())
        return made

    def _keep(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def extrapolated(rehearse: Callable[[int], int], layers: int) -> int:
    """What ``layers`` cost, of what one and two do."""
    one, two = (rehearse(depth) for depth in DEPTHS)
    return one + (layers - 1) * (two - one)
