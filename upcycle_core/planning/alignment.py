"""What Symphony-MoE's comparisons of models hold and keep.

Shapes: L layers, I intermediate size, H hidden size, W what all query heads say of a token, N
models or experts.
"""

from upcycle_core.evaluation.similarity.config import SimilarityConfig
from upcycle_core.planning.memory import activations_bytes, weights_held
from upcycle_core.planning.shape import Shape
from upcycle_core.symphony.config import AlignmentConfig, CalibrationConfig

FP32, FP64 = 4, 8
FEATURES = {"fp32": 4, "bf16": 2}
SQUARES = 4
"""Matrices of neurons by neurons that one assignment holds: sums, likeness, costs, and a copy."""


def pair_sums_bytes(shape: Shape, layers: int) -> int:
    """Of the cross-moments of so many layers: neurons, heads, and the residual stream once."""
    squares = shape.inner**2 + shape.heads_width**2
    rows = 4 * (shape.inner + shape.heads_width)
    return FP64 * (layers * (squares + rows) + shape.hidden**2 + 4 * shape.hidden)


def pairs_file_bytes(shape: Shape, config: CalibrationConfig) -> int:
    """Of all files of one model's comparison with the anchor."""
    groups = -(-shape.layers // config.layers)
    stream = FP64 * (shape.hidden**2 + 4 * shape.hidden)
    return pair_sums_bytes(shape, shape.layers) + (groups - 1) * stream


def pairs_bytes(shape: Shape, config: CalibrationConfig, *, device: str = "cpu") -> int:
    """Of a piece: both models, the sums of a group of layers, and a batch's features.

    Args:
        shape: Of both models.
        config: Batches, precision, layers of a group.
        device: Where it runs.
    """
    layers = min(config.layers, shape.layers)
    tokens = config.batch_size * config.sequence_length
    # All paths of the first model are held until the second has run.
    kept = layers * (shape.inner + shape.heads_width + 2 * shape.hidden) + shape.hidden
    features = FEATURES[config.features] * tokens * kept
    batch = (config.batch_size, config.sequence_length)
    active = activations_bytes(shape, batch, config.precision, device)
    models = 2 * weights_held(shape, config.precision, device)
    product = FP32 * shape.inner**2
    return models + active + pair_sums_bytes(shape, layers) + features + product


def aligning_bytes(shape: Shape, config: AlignmentConfig) -> int:
    """Of one layer's assignment."""
    neurons = SQUARES * FP64 * shape.inner**2 if config.neurons != "none" else 0
    heads = SQUARES * FP64 * shape.heads_width**2 if config.heads == "match" else 0
    return max(neurons, heads)


def merging_bytes(shape: Shape, models: int) -> int:
    """Of merging the backbone: one tensor of all models and the result, the sphere's in fp64."""
    return (models + 1) * max(shape.itemsize * shape.largest, FP64 * shape.heads_width**2)


def similarity_bytes(
    shape: Shape, config: SimilarityConfig, streams: int, *, experts: int = 1, device: str = "cpu"
) -> int:
    """Of comparing two dense models, or the experts of one MoE, in all layers at once.

    Args:
        shape: The dense model, or any of the experts.
        config: Representations, batches, precision.
        streams: N that are compared.
        experts: Of the MoE; 1 for dense models.
        device: Where it runs.
    """
    sizes = {"neurons": shape.inner, "outputs": shape.hidden}
    widths = [sizes[name] for name in config.representations]
    sums = shape.layers * sum(_streams_bytes(streams, size) for size in widths)
    comparing = 3 * FP64 * max(widths, default=0) ** 2
    batch = (config.batch_size, config.sequence_length)
    active = activations_bytes(shape, batch, config.precision, device)
    features = FP32 * batch[0] * batch[1] * streams * sum(widths)
    weights = weights_held(shape, config.precision, device, experts=experts)
    models = 1 if experts > 1 else streams
    return sums + models * weights + max(active + features, comparing)


def _streams_bytes(streams: int, size: int) -> int:
    grams = streams * size * (size + 1) // 2
    return FP64 * (grams + streams * (streams - 1) // 2 * size**2)
