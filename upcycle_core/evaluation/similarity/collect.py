"""Run models over text and count what their FFNs do, layer by layer.

Two representations, named wherever a number of theirs is shown: ``neurons``, act(gate) * up
[T, I], what down_proj reads; ``outputs``, what the FFN adds to the residual stream [T, H].
Shapes: T tokens, S positions, B sequences, I neurons, H hidden size, N models or experts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from upcycle_core.activations.capture import router_inputs
from upcycle_core.corpora.batches import Batch
from upcycle_core.evaluation.similarity.cka import StreamMoments
from upcycle_core.evaluation.similarity.config import REPRESENTATIONS, Representation
from upcycle_core.progress import Progress

Key = tuple[int, Representation]


@dataclass(frozen=True)
class PairedBatch:
    """The same text as each of N models reads it, and which positions stand opposite each other.

    Args:
        input_ids: N tensors [B, S] int64; every model has an S of its own.
        attention_mask: N tensors [B, S], 1 on tokens and 0 on padding, which is on the right.
        rows: N tensors [R] int64: positions, counted through the flattened [B, S], that are
            compared; row r of every model stands at the same place of the text.

    Raises:
        ValueError: The models do not have the same number of rows, a row is padding, or padding
            stands left of a token.
    """

    input_ids: tuple[Tensor, ...]
    attention_mask: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if len({len(rows) for rows in self.rows}) > 1:
            raise ValueError(f"rows of each model: {[len(rows) for rows in self.rows]}")
        for mask_BS, rows in zip(self.attention_mask, self.rows, strict=True):
            if not bool(mask_BS.flatten()[rows].all()):
                raise ValueError("a row that is compared is padding")
            if bool((mask_BS.diff(dim=1) > 0).any()):
                raise ValueError("padding stands left of a token")


def same_for_all(batch: Batch, models: int) -> PairedBatch:
    """What ``models`` of one vocabulary read: the same ids, and every position but padding."""
    rows = batch.attention_mask.flatten().nonzero()[:, 0]
    return PairedBatch(
        (batch.input_ids,) * models, (batch.attention_mask,) * models, (rows,) * models
    )


@torch.no_grad()
def collect_dense(
    models: Sequence[nn.Module],
    batches: Iterable[PairedBatch],
    moments: Mapping[Key, StreamMoments],
    *,
    progress: Progress,
) -> None:
    """Forward the same text through N dense models, each on its own hidden states, and count.

    Of one batch the features of every model, layer and representation in ``moments`` are held at
    the same time: N R (I + H) numbers a layer.

    Args:
        models: Decoders without lm_head (``LlamaModel``, ...), on one device.
        batches: The text.
        moments: {(layer, representation): what counts it}, of N streams each.
        progress: Hears of every batch, in rows.
    """
    held: dict[Key, list[Tensor]] = {}
    device = next(models[0].parameters()).device
    for batch in batches:
        held = {key: [] for key in moments}
        for model, ids_BS, rows in zip(models, batch.input_ids, batch.rows, strict=True):
            with _ffn_features(model, rows.to(device), held):
                # Causal attention hides padding on the right from every counted token.
                model(input_ids=ids_BS.to(device), use_cache=False)
        for key, streams in held.items():
            moments[key].update(streams)
        progress.advance(len(batch.rows[0]))


@contextmanager
def _ffn_features(model: Any, rows: Tensor, held: Mapping[Key, list[Tensor]]) -> Iterator[None]:
    """Within this context a forward of ``model`` appends its features at ``rows`` to ``held``."""

    def hook_of(layer: int):
        def keep(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            for representation, x in zip(REPRESENTATIONS, (inputs[0], output), strict=True):
                if (layer, representation) in held:
                    held[layer, representation].append(x.flatten(0, -2).index_select(0, rows))

        return keep

    with ExitStack() as stack:
        for layer in {layer for layer, _ in held}:
            down = model.layers[layer].mlp.down_proj
            stack.callback(down.register_forward_hook(hook_of(layer)).remove)
        yield


@torch.no_grad()
def collect_moe(
    model: nn.Module,
    batches: Iterable[Batch],
    moments: Mapping[Key, StreamMoments],
    *,
    progress: Progress,
) -> None:
    """Apply every expert to every token and count: all experts of a layer read the same input.

    That input is what the router reads in the model's own forward pass, in which each token goes
    through the k experts that the router chose. A shared expert, which is not routed to, is not
    counted.

    Args:
        model: A MoE decoder without lm_head (``MixtralModel``, ``Qwen2MoeModel``,
            ``Qwen3MoeModel``).
        batches: The text; padding is not counted.
        moments: {(layer, representation): what counts it}, of one stream per expert each.
        progress: Hears of every batch, in tokens.
    """
    decoder: Any = model
    layers = sorted({layer for layer, _ in moments})
    rows = torch.empty(0)
    # Looked up before the pass: the last layer's MLP is left out of it.
    experts = {layer: decoder.layers[layer].mlp.experts for layer in layers}

    def count(layer: int, x_BSH: Tensor) -> None:
        x_TH = x_BSH.flatten(0, -2).index_select(0, rows)
        for representation, streams in expert_features(experts[layer], x_TH).items():
            if (layer, representation) in moments:
                moments[layer, representation].update(streams)

    device = next(model.parameters()).device
    with router_inputs(model, count, layers=layers):
        for batch in batches:
            rows = batch.attention_mask.flatten().nonzero()[:, 0].to(device)
            model(input_ids=batch.input_ids.to(device), use_cache=False)
            progress.advance(len(rows))


def expert_features(experts: Any, x_TH: Tensor) -> dict[Representation, list[Tensor]]:
    """What each of D experts makes of the same input.

    Args:
        experts: Fused as in transformers: ``gate_up_proj`` [D, 2 I, H], ``down_proj`` [D, H, I].
        x_TH: The input.

    Returns:
        ``neurons``: D tensors [T, I]; ``outputs``: D tensors [T, H], not weighted by the router.
    """
    found: dict[Representation, list[Tensor]] = {"neurons": [], "outputs": []}
    for gate_up_proj, down_proj in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        gate_TI, up_TI = functional.linear(x_TH, gate_up_proj).chunk(2, dim=-1)
        neurons_TI = experts.act_fn(gate_TI) * up_TI
        found["neurons"].append(neurons_TI)
        found["outputs"].append(functional.linear(neurons_TI, down_proj))
    return found
