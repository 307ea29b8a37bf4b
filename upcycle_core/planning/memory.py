"""Peak memory of each kind of computation, beside what an interpreter with its libraries takes.

On a CPU weights that a file holds in the type that is asked for are mapped, and cost no anonymous
memory; those of a MoE are put together, expert upon expert, and do.

Shapes: L layers, H hidden size, I intermediate size, V vocabulary, T tokens, D experts.
"""

from math import ceil

from upcycle_core.activations.moments import triangle_size
from upcycle_core.activations.regression import HALVES
from upcycle_core.checkpoints.reader import CHUNK, CheckpointReader
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.repair import LOGITS_AT_ONCE
from upcycle_core.dume.shared_head import ROWS_AT_ONCE
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.perplexity import TOKENS_AT_ONCE
from upcycle_core.planning.estimate import LOGITS, forward_bytes
from upcycle_core.planning.rates import Arithmetic
from upcycle_core.planning.shape import Shape
from upcycle_core.precision import weights_type

FP32, FP64, INT64 = 4, 8, 8


def statistics_bytes(shape: Shape, config: StatisticsConfig, *, device: str = "cpu") -> int:
    """Of a piece of the statistics pass: the model, and one triangle of sums a layer and cell.

    Args:
        shape: The dense model whose text is forwarded.
        config: Batches, precision, and what is kept apart.
        device: Where it runs.
    """
    batch = (config.batch_size, config.sequence_length)
    forward = forward_bytes(shape, batch, precision=config.precision, device=device)
    batch_sums = FP32 * shape.hidden**2 + FP64 * triangle_size(shape.hidden)
    sums = statistics_file_bytes(shape, config) + batch_sums + _index(shape)
    return forward - _mapped(shape, config.precision, device) + sums


def statistics_file_bytes(shape: Shape, config: StatisticsConfig) -> int:
    """Of a file of statistics: fp64 triangles and sums, a layer and cell each."""
    cells = config.parts * (len(config.position_buckets) + 1)
    each = FP64 * (triangle_size(shape.hidden) + shape.hidden) + INT64
    return shape.layers * cells * each


def repair_bytes(
    shape: Shape, config: StatisticsConfig, tokens: int, *, head: bool, device: str = "cpu"
) -> int:
    """Of the repair of one expert, layer by layer: two models' states, one layer's sums.

    Args:
        shape: The dense model.
        config: Batches and precision.
        tokens: Calibration tokens, padding included.
        head: Whether the last layer may aim at the head's target, which holds both heads.
        device: Where it runs.
    """
    size = weights_type(config.precision, device).itemsize
    layer = (shape.whole - shape.ends) // shape.layers
    states = 2 * size * tokens * shape.hidden
    inner = size * tokens * shape.inner
    sums = HALVES * FP64 * shape.inner * (shape.inner + shape.hidden)
    solving = 2 * FP64 * shape.inner * (shape.inner + shape.hidden)
    embedding = size * shape.vocabulary * shape.hidden
    heads = 0
    if head and device == "cpu":  # a GPU is sent some rows at a time
        heads = 2 * FP32 * shape.vocabulary * shape.hidden
    if head:  # the sums of the other target, both targets' solutions, of all text and of halves
        sums += (HALVES + 2 * (1 + HALVES)) * FP64 * shape.inner * shape.hidden
        heads += LOGITS * FP32 * min(tokens, LOGITS_AT_ONCE) * shape.vocabulary
    working = max(solving, _activations(shape, config, device))
    return 2 * size * layer + states + inner + sums + working + max(embedding, heads)


def routed_repair_bytes(
    shape: Shape,
    config: StatisticsConfig,
    tokens: int,
    *,
    experts: int,
    head: bool,
    device: str = "cpu",
) -> int:
    """Of the second repair: all domains' states in two models each, all experts' sums of a layer.

    Args:
        shape: The dense model.
        config: Batches and precision.
        tokens: Calibration tokens of a domain, padding included.
        experts: D.
        head: Whether last layers may aim at the head's target.
        device: Where it runs.
    """
    size = weights_type(config.precision, device).itemsize
    layer = (shape.whole - shape.ends) // shape.layers
    states = 2 * experts * size * tokens * shape.hidden
    sums = (experts * HALVES + 2) * FP64 * shape.inner * (shape.inner + shape.hidden)
    weights = size * (2 * layer + experts * shape.ffns // shape.layers)
    embedding = size * shape.vocabulary * shape.hidden
    heads = 2 * FP32 * shape.vocabulary * shape.hidden if head else 0
    return states + max(weights + sums + _activations(shape, config, device), embedding, heads)


def merged_attention_bytes(
    shape: Shape,
    config: StatisticsConfig,
    tokens: int,
    *,
    experts: int,
    distils: bool,
    device: str = "cpu",
) -> int:
    """Of an attention merged by regression: all domains' states, in two models each where the
    merged model's are read, and a layer's sums.

    Args:
        shape: The dense model.
        config: Batches and precision.
        tokens: Calibration tokens of a domain, padding included.
        experts: D.
        distils: Whether it is ``distilled``, else ``regmean``.
        device: Where it runs.
    """
    size = weights_type(config.precision, device).itemsize
    layer = (shape.whole - shape.ends) // shape.layers
    states = ((2 if distils else 1) * experts + 1) * size * tokens * shape.hidden
    read = max(shape.hidden, shape.heads_width)
    if not distils:  # each expert's halves, two sums of them, and a system
        sums = (experts * (HALVES + 2) + 3) * FP64 * read**2
    else:  # of queries, keys and values apart, whose outputs are kept
        made = shape.heads_width + 2 * shape.key_value_width
        sums = (HALVES + 1) * FP64 * read * (3 * read + made) + size * tokens * made
    embedding = size * shape.vocabulary * shape.hidden
    return states + max(size * layer + sums + _activations(shape, config, device), embedding)


def sequential_bytes(
    shape: Shape, config: StatisticsConfig, *, experts: int, device: str = "cpu"
) -> int:
    """Of the statistics of one layer behind solved routers: the MoE, and a layer's sums.

    Args:
        shape: Any of the experts.
        config: Batches, precision, and what is kept apart.
        experts: D.
        device: Where it runs.
    """
    batch = (config.batch_size, config.sequence_length)
    sums = statistics_file_bytes(shape, config) // shape.layers + _index(shape)
    sums += FP32 * shape.hidden**2 + FP64 * triangle_size(shape.hidden)
    weights = weights_held(shape, config.precision, device, experts=experts)
    return weights + activations_bytes(shape, batch, config.precision, device) + sums


def evaluation_bytes(
    shape: Shape, config: EvaluationConfig, *, experts: int = 1, device: str = "cpu"
) -> int:
    """Of scoring a dense model's text, or that of the MoE of so many.

    Args:
        shape: The dense model, or any of the experts.
        config: Batches and precision.
        experts: D; 1 for the dense model.
        device: Where it runs.
    """
    batch = (config.batch_size, config.sequence_length)
    size = weights_type(config.precision, device).itemsize
    activations = activations_bytes(shape, batch, config.precision, device)
    logits = _logits(shape, batch, size)
    weights = weights_held(shape, config.precision, device, experts=experts)
    return weights + max(activations, logits)


def scoring_bytes(
    reader: CheckpointReader, config: EvaluationConfig, *, device: str = "cpu"
) -> int:
    """``evaluation_bytes`` of a checkpoint: of a dense model, or of a stock MoE.

    Raises:
        InputError: It is neither.
    """
    shape, experts = Shape.of_scored(reader)
    return evaluation_bytes(shape, config, experts=experts, device=device)


def streamed_statistics_bytes(
    shape: Shape, config: StatisticsConfig, *, device: str = "cpu"
) -> int:
    """Of the statistics pass layer by layer: one layer's weights and sums, or the embedding.

    Args:
        shape: The dense model whose text is forwarded.
        config: Batches, precision, and what is kept apart.
        device: Where it runs.
    """
    batch = (config.batch_size, config.sequence_length)
    sums = 2 * statistics_file_bytes(shape, config) // shape.layers + _index(shape)
    sums += FP32 * shape.hidden**2 + FP64 * triangle_size(shape.hidden)
    layer = sums + activations_bytes(shape, batch, config.precision, device)
    held = 0 if _mapped(shape, config.precision, device) else _layer(shape, config, device)
    return max(held + layer, _ends(shape, config.precision, device))


def streamed_evaluation_bytes(
    shape: Shape, config: EvaluationConfig, *, experts: int = 1, device: str = "cpu"
) -> int:
    """Of scoring layer by layer: one layer's weights, or the head's logits.

    Args:
        shape: The dense model, or any of the experts.
        config: Batches and precision.
        experts: D; 1 for the dense model.
        device: Where it runs.
    """
    batch = (config.batch_size, config.sequence_length)
    size = weights_type(config.precision, device).itemsize
    mapped = _mapped(shape, config.precision, device)
    fused = size * experts * shape.ffns // shape.layers if experts > 1 else 0
    if not mapped:
        fused += _layer(shape, config, device) - (size * shape.ffns // shape.layers) * bool(fused)
    activations = activations_bytes(shape, batch, config.precision, device)
    ends = _ends(shape, config.precision, device) + _logits(shape, batch, size)
    return max(fused + activations, ends)


def streamed_states_bytes(
    shape: Shape, precision: Arithmetic, tokens: int, *, device: str = "cpu"
) -> int:
    """On the disk, of a pass layer by layer: hidden states before a layer and behind it.

    Args:
        shape: The dense model, or any of the experts.
        precision: Of the pass.
        tokens: That go through it, each as often as it does.
        device: Where it runs.
    """
    return 2 * weights_type(precision, device).itemsize * tokens * shape.hidden


def activations_bytes(
    shape: Shape, batch: tuple[int, int], precision: Arithmetic, device: str
) -> int:
    """Of a pass without the head, beside its weights."""
    forward = forward_bytes(shape, batch, precision=precision, device=device)
    return forward - weights_type(precision, device).itemsize * (shape.whole - _head(shape))


def weights_held(shape: Shape, precision: Arithmetic, device: str, *, experts: int = 1) -> int:
    """Anonymous memory of a model's weights, or of the MoE of so many."""
    size = weights_type(precision, device).itemsize
    weights = size * shape.whole - _mapped(shape, precision, device)
    if experts > 1:
        weights = max(0, weights - size * shape.ffns)
        weights += size * experts * shape.ffns
    return weights


def divided_bytes(
    needed: int, shape: Shape, precision: Arithmetic, device: str, gpus: float
) -> int:
    """Of each of several GPUs that hold a model's weights among them; of one all of them.

    Modules are not divided themselves, and accelerate keeps room for one more on the first GPU.

    Args:
        needed: Bytes of all weights.
        shape: The model's, or that of its dense model.
        precision: What it computes in.
        device: As a recipe's resources say it.
        gpus: How many there are.
    """
    if gpus <= 1:
        return needed
    embedding = weights_type(precision, device).itemsize * shape.vocabulary * shape.hidden
    largest = max(embedding, needed // shape.layers)
    return ceil((needed + (gpus + 1) * largest) / gpus)


def _logits(shape: Shape, batch: tuple[int, int], size: int) -> int:
    return (size + 2 * FP32) * min(batch[0] * batch[1], TOKENS_AT_ONCE) * shape.vocabulary


def _layer(shape: Shape, config: StatisticsConfig | EvaluationConfig, device: str) -> int:
    """A dense layer's weights."""
    size = weights_type(config.precision, device).itemsize
    return size * (shape.whole - shape.ends) // shape.layers


def _ends(shape: Shape, precision: Arithmetic, device: str) -> int:
    """The embedding, or a head, where it is not mapped."""
    size = weights_type(precision, device).itemsize
    if _mapped(shape, precision, device):
        return 0
    return size * shape.vocabulary * shape.hidden


def _activations(shape: Shape, config: StatisticsConfig, device: str) -> int:
    """What a batch on its way through a layer holds beside the weights."""
    batch = (config.batch_size, config.sequence_length)
    forward = forward_bytes(shape, batch, precision=config.precision, device=device)
    return forward - weights_type(config.precision, device).itemsize * shape.whole


def _mapped(shape: Shape, precision: Arithmetic, device: str) -> int:
    """Bytes of weights that are mapped from their files."""
    needed = weights_type(precision, device)
    # fp16 is converted to bf16, though it is as wide.
    as_stored = needed.itemsize == shape.itemsize and shape.dtype in (None, needed)
    return needed.itemsize * shape.whole if device == "cpu" and as_stored else 0


def averaging_bytes(shape: Shape) -> int:
    """Of averaging: a piece of the sum, of another tensor's and of the result, of any model."""
    return CHUNK * (FP32 + FP32 + shape.itemsize)


def fitted_head_bytes(shape: Shape, *, experts: int) -> int:
    """Of a head fitted to so many experts: it, and some rows' systems.

    Args:
        shape: The dense model.
        experts: D.
    """
    matrix = FP64 * shape.hidden**2
    fitting = FP32 * shape.vocabulary * shape.hidden + (3 * experts + 6) * matrix
    return fitting + 10 * FP64 * min(ROWS_AT_ONCE, shape.vocabulary) * shape.hidden


def final_states_bytes(
    shape: Shape, config: StatisticsConfig, tokens: int, *, device: str = "cpu"
) -> int:
    """Of the second moment of what one expert's head reads: its text's states, through a layer.

    Args:
        shape: The dense model.
        config: Batches and precision.
        tokens: Calibration tokens, padding included.
        device: Where it runs.
    """
    size = weights_type(config.precision, device).itemsize
    layer = size * (shape.whole - shape.ends) // shape.layers
    embedding = size * shape.vocabulary * shape.hidden
    working = max(layer + _activations(shape, config, device), embedding)
    return size * tokens * shape.hidden + working + FP64 * shape.hidden**2


def solving_bytes(shape: Shape, config: StatisticsConfig, *, cross_validates: bool = False) -> int:
    """Of solving one layer's routers: a domain's triangle and square, the sum of all, its factor.

    Files of sums are mapped; what is left of one without a fold is copied.

    Args:
        shape: Any of the experts.
        config: What is kept apart.
        cross_validates: Whether lambda is found over folds.
    """
    triangle, matrices = FP64 * triangle_size(shape.hidden), 4
    copied = 0
    if cross_validates:
        copied = (config.parts - 1) * (len(config.position_buckets) + 1)
        matrices += 1
    return (1 + copied) * triangle + matrices * FP64 * shape.hidden**2 + _index(shape)


def _index(shape: Shape) -> int:
    """Where the triangle's entries lie in the square."""
    return INT64 * triangle_size(shape.hidden)


def _head(shape: Shape) -> int:
    """Parameters of a head of its own."""
    both = 2 * shape.vocabulary * shape.hidden
    return both // 2 if shape.ends == both else 0
