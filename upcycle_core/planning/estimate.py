"""Peak memory of a step or a pass: rehearsed where it is worth it, else bounded in no time.

A rehearsal takes a second or two, whatever the size of the model. A model that needs less than an
interpreter with its libraries does not decide what fits: there an upper bound will do.
"""

from upcycle_core.planning import rehearsal
from upcycle_core.planning.shape import Shape
from upcycle_core.precision import weights_type
from upcycle_core.training.config import TrainingConfig
from upcycle_core.training.head import SLICE

SMALL = 250_000_000
"""Bytes; an interpreter with its libraries holds 400 million."""
FP32, TRAINED = 4, 16
KEPT = (20, 8, 8)
"""Numbers that a layer keeps a token for its backward pass, at most, in H, I and heads' widths."""
PASSING = (8, 3, 4)
"""The same of a forward pass, which keeps nothing."""
LOGITS = 3
"""Times that a slice of logits is held."""


def training_bytes(
    shape: Shape, config: TrainingConfig, *, device: str = "cpu", workers: int = 1
) -> int:
    """As ``rehearsal.training_bytes``, or at most ``SMALL`` and no less than that."""
    tokens = config.batch_size * config.sequence_length
    logits = LOGITS * FP32 * min(tokens * shape.vocabulary, max(SLICE, shape.vocabulary))
    kept = tokens * shape.layers * FP32 * _width(shape, KEPT)
    scores = config.batch_size * config.sequence_length**2 * _heads(shape) * FP32
    bound = TRAINED * shape.whole + kept + shape.layers * scores + logits
    if bound <= SMALL:
        return bound
    return rehearsal.training_bytes(shape, config, device=device, workers=workers)


def forward_bytes(
    shape: Shape, tokens: tuple[int, int], *, precision: str, device: str = "cpu"
) -> int:
    """As ``rehearsal.forward_bytes``, or at most ``SMALL`` and no less than that."""
    size = weights_type(precision, device).itemsize  # type: ignore[arg-type]
    count = tokens[0] * tokens[1]
    scores = tokens[0] * tokens[1] ** 2 * _heads(shape) * FP32
    bound = size * shape.whole + count * FP32 * _width(shape, PASSING) + scores
    if bound <= SMALL:
        return bound
    return rehearsal.forward_bytes(shape, tokens, precision=precision, device=device)


def _width(shape: Shape, times: tuple[int, int, int]) -> int:
    sizes = (shape.hidden, shape.inner, shape.heads_width)
    return sum(count * size for count, size in zip(times, sizes, strict=True))


def _heads(shape: Shape) -> int:
    return int(shape.config["num_attention_heads"])
