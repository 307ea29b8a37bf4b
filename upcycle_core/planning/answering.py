"""Peak memory of models that answer: a prompt at once, then token by token.

As in ``planning.memory``, weights that a file holds in the type that is asked for are mapped.
"""

from upcycle_core.planning.memory import activations_bytes, weights_held
from upcycle_core.planning.rates import Arithmetic
from upcycle_core.planning.shape import Shape
from upcycle_core.precision import weights_type

FP32 = 4


def answering_bytes(
    shape: Shape,
    batch: tuple[int, int],
    precision: Arithmetic,
    *,
    pruned: int,
    experts: int = 1,
    device: str = "cpu",
) -> int:
    """Of answers by the largest of a dense model, a MoE and a pruned SIMoE.

    Args:
        shape: The dense model, or any of the experts.
        batch: Rows at once, and tokens of a prompt with its answer.
        precision: Of weights and arithmetic.
        pruned: Bytes of the SIMoE's files.
        experts: D; 1 where there is no MoE.
        device: Where it runs.
    """
    size, (rows, length) = weights_type(precision, device).itemsize, batch
    cache = 2 * shape.layers * shape.key_value_width * size * rows * length
    logits = (size + FP32) * rows * shape.vocabulary  # of the last position
    beside = activations_bytes(shape, batch, precision, device) + cache + logits
    weights = weights_held(shape, precision, device, experts=experts)
    return beside + max(weights, pruned_held(pruned, precision, device=device))


def pruned_held(size: int, precision: Arithmetic, *, device: str) -> int:
    """Anonymous memory of a pruned SIMoE's weights, which its files hold in fp32.

    Args:
        size: Bytes of its files.
        precision: What it computes in.
        device: Where it runs.
    """
    itemsize = weights_type(precision, device).itemsize
    return 0 if device == "cpu" and itemsize == FP32 else itemsize * size // FP32
