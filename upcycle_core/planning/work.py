"""Floating-point operations of passes and steps, from shapes.

Shapes: L layers, H hidden size, V vocabulary, W what all query heads say, T tokens, S tokens of a
sequence, k experts a token.
"""

from upcycle_core.dume.shared_head import ROUNDS
from upcycle_core.planning.shape import Shape
from upcycle_core.training.config import ExpertTrainingConfig, TrainingConfig

PRODUCT = 2
"""A multiplication and an addition."""
FITTING_STEPS = 20
"""Of conjugate gradients a round of a fitted head, as the demo's took."""
FP64_TO_FP32 = 2
LAMBDAS_TRIED = 2
"""Of a repaired layer, from the largest on; more where the second is better."""


def forward_flops(
    shape: Shape, tokens: int, length: int, *, head: bool = True, top_k: int = 1
) -> int:
    """Of a forward pass.

    Args:
        shape: The dense model, or any expert of a MoE.
        tokens: T.
        length: S; a token attends to half of them.
        head: Whether logits are computed.
        top_k: k of a MoE.
    """
    layers = PRODUCT * (shape.linear + (top_k - 1) * shape.ffns)
    attention = PRODUCT * shape.layers * length * shape.heads_width
    logits = PRODUCT * shape.vocabulary * shape.hidden if head else 0
    return tokens * (layers + attention + logits)


def training_flops(
    shape: Shape, config: TrainingConfig, *, top_k: int = 1, share: float = 1.0
) -> int:
    """Of a whole training: forward, its gradients, and those of what is trained.

    Args:
        shape: The dense model, or any expert of a MoE.
        config: Steps, batches; of an expert what is trained.
        top_k: k of a MoE.
        share: Of the parameters of a MoE that are trained.
    """
    forward = forward_flops(shape, config.tokens, config.sequence_length, top_k=top_k)
    method = config.method if isinstance(config, ExpertTrainingConfig) else "full"
    trained = {"full": share, "layers": 1.0, "ffn": shape.ffns / shape.whole, "lora": 0.0}[method]
    return int(forward * (2 + trained + config.gradient_checkpointing))


def statistics_flops(shape: Shape, tokens: int, length: int) -> int:
    """Of the statistics of a text: a pass without the head, and x x^T of each layer."""
    forward = forward_flops(shape, tokens, length, head=False)
    return forward + PRODUCT * tokens * shape.layers * shape.hidden**2


def fitted_head_flops(shape: Shape, *, experts: int) -> int:
    """Of a head that is fitted to so many experts: a product a row, expert and step.

    It is done in fp64, which counts twice here.
    """
    step = PRODUCT * shape.vocabulary * shape.hidden**2 * (experts + 1)
    return FP64_TO_FP32 * ROUNDS * FITTING_STEPS * step


def repair_flops(shape: Shape, tokens: int, length: int, *, passes: int = 2) -> int:
    """Of the repair of one expert: passes over its text, each layer's sums, and their systems.

    The sums are of what down projections read, a a^T and a r^T. Systems are factorised in fp64,
    which counts twice here, of both halves for each lambda that is tried, and once of the whole.

    Args:
        shape: The dense model.
        tokens: T; 0 where that is not known, and nothing is.
        length: S.
        passes: Through either model.
    """
    if not tokens:
        return 0
    inner, hidden = shape.inner, shape.hidden
    sums = PRODUCT * tokens * (inner**2 // 2 + inner * hidden)
    factors = (2 * LAMBDAS_TRIED + 1) * (inner**3 // 3 + PRODUCT * inner**2 * hidden)
    own = shape.layers * (sums + FP64_TO_FP32 * factors)
    return passes * forward_flops(shape, tokens, length, head=False) + own


def merged_attention_flops(
    shape: Shape, tokens: int, length: int, *, experts: int, distils: bool
) -> int:
    """Of an attention merged by regression: each expert's text through its layers, thrice.

    Twice for what matrices read, once for the next layer; through the merged model's as often,
    where its own inputs count.
    """
    models = 2 if distils else 1
    return 3 * models * experts * forward_flops(shape, tokens, length, head=False)


def pairs_flops(shape: Shape, tokens: int, length: int, *, groups: int) -> int:
    """Of two models over the same text, once a group of layers, and the products of all.

    A group computes no layer behind its last.
    """
    forward = 2 * forward_flops(shape, tokens, length, head=False)
    squares = shape.layers * (shape.inner**2 + shape.heads_width**2 + shape.hidden**2)
    return int(forward * (groups + 1) / 2) + PRODUCT * tokens * squares


def similarity_flops(
    shape: Shape, tokens: int, length: int, *, streams: int, widths: list[int]
) -> int:
    """Of comparing streams over the same text, in all layers."""
    forward = streams * forward_flops(shape, tokens, length, head=False)
    products = streams * (streams + 1) // 2 * sum(width**2 for width in widths)
    return forward + PRODUCT * tokens * shape.layers * products
