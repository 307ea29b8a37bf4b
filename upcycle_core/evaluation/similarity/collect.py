"""Run models over text and count what their FFNs do, layer by layer.

Two representations, named wherever a number of theirs is shown: ``neurons``, act(gate) * up
[T, I], what down_proj reads; ``outputs``, what the FFN adds to the residual stream [T, H].
Shapes: T tokens, S positions, B sequences, P paired positions, I neurons, H hidden size, D experts.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from upcycle_core.activations.capture import router_inputs
from upcycle_core.activations.pairs import PairedBatch
from upcycle_core.corpora.batches import Batch
from upcycle_core.evaluation.similarity.cka import StreamMoments
from upcycle_core.evaluation.similarity.config import REPRESENTATIONS, Representation
from upcycle_core.progress import Progress

Key = tuple[int, Representation]


@torch.no_grad()
def collect_dense(
    models: tuple[nn.Module, nn.Module],
    batches: Iterable[PairedBatch],
    moments: Mapping[Key, StreamMoments],
    *,
    progress: Progress,
) -> None:
    """Forward the same text through two dense models, each on its own hidden states, and count.

    Of one batch the features of both models, every layer and representation in ``moments`` are
    held at the same time: 2 P (I + H) numbers a layer.

    Args:
        models: Decoders without lm_head (``LlamaModel``, ...), on one device.
        batches: The text.
        moments: {(layer, representation): what counts it}, of two streams each.
        progress: Hears of every batch, in rows.
    """
    held: dict[Key, list[Tensor]] = {}
    device = next(models[0].parameters()).device
    for batch in batches:
        held = {key: [] for key in moments}
        both = ((batch.first_ids, batch.first_rows), (batch.second_ids, batch.second_rows))
        for model, (ids_BS, rows) in zip(models, both, strict=True):
            with _ffn_features(model, rows.to(device), held):
                # Causal attention hides padding on the right from every counted token.
                model(input_ids=ids_BS.to(device), use_cache=False)
        for key, streams in held.items():
            moments[key].update(streams)
        progress.advance(len(batch.first_rows))


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
