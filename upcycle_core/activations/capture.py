"""Hidden states of a decoder as they pass by: what each layer's router would see."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

Consumer = Callable[[int, Tensor], None]


@contextmanager
def router_inputs(model: nn.Module, consume: Consumer, *, layers: Sequence[int]) -> Iterator[None]:
    """Within this context each forward of ``model`` hands the routers' inputs to ``consume``.

    A router reads what the layer's MLP reads. Nothing behind the last one's input is computed: the
    model is cut there and mended afterwards.

    Args:
        model: A decoder without lm_head, dense or MoE (``LlamaModel``, ``MixtralModel``, ...).
        consume: Called with the layer and its router's input [B, S, H], in the layers' order.
        layers: Which layers are watched.
    """
    decoder_layers: Any = model.layers
    watched = sorted(layers)
    with ExitStack() as stack:
        stack.enter_context(_cut_before_mlp(model, watched[-1]))
        for layer in watched:
            hook = decoder_layers[layer].mlp.register_forward_pre_hook(
                lambda _mlp, inputs, layer=layer: consume(layer, inputs[0])
            )
            stack.callback(hook.remove)
        yield


@contextmanager
def _cut_before_mlp(model: nn.Module, layer: int) -> Iterator[None]:
    """Leave out the MLP of ``layer`` and everything behind it."""
    layers: Any = model.layers
    last, norm = layers[layer], model.norm
    mlp = last.mlp
    model.layers, last.mlp, model.norm = layers[: layer + 1], nn.Identity(), nn.Identity()
    try:
        yield
    finally:
        model.layers, last.mlp, model.norm = layers, mlp, norm
