"""Measure checkpoints: paths in, plain numbers out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle_core.activations.pairs import PairedBatch
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.corpora.batches import Batch, paragraph_batches, paragraphs
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.similarity.cka import StreamMoments, compare
from upcycle_core.evaluation.similarity.collect import Key, collect_dense, collect_moe
from upcycle_core.evaluation.similarity.config import Representation, SimilarityConfig
from upcycle_core.precision import weights_type
from upcycle_core.progress import Progress, Silent


@dataclass(frozen=True, kw_only=True)
class PairSimilarity:
    """How alike two experts, or two dense models, are at one layer.

    Args:
        layer: Which, from 0.
        representation: What is compared.
        first: Name of one.
        second: Name of the other.
        rows: Positions of text that were compared.
        features: I or H.
        cka, matched, best, constant_first, constant_second: As in ``cka.Likeness``.
    """

    layer: int
    representation: Representation
    first: str
    second: str
    rows: int
    features: int
    cka: float | None
    matched: float
    best: float | None
    constant_first: int
    constant_second: int


def split_batches(corpora: Sequence[Path], config: SimilarityConfig) -> Iterator[Batch]:
    """The text of tokenised splits, ``config.tokens`` of each.

    Args:
        corpora: One split's directory a domain (``TokenCorpus``).
        config: How it is cut.

    Raises:
        InputError: A split without a token to compare at.
    """
    cut = _cut(corpora, config)
    # Any id does for padding: nothing that is counted sees it.
    return (
        batch
        for corpus, pieces in cut
        for batch in paragraph_batches(corpus, pieces, config.batch_size)
    )


def moe_similarity(
    checkpoint: Path,
    corpora: Sequence[Path],
    names: Sequence[str],
    *,
    config: SimilarityConfig,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[PairSimilarity]:
    """Compare every two experts of a MoE, each applied to every token of its layer's input.

    Args:
        checkpoint: Of a stock architecture (Mixtral, Qwen2Moe, Qwen3Moe).
        corpora: Tokenised splits for its vocabulary, one a domain.
        names: Of the experts, in order.
        config: Text and precision.
        device: Where the model runs and sums are kept; ``StreamMoments`` says how much a layer is.
        progress: Hears of every batch, in tokens.

    Returns:
        One entry per layer, representation and two experts.

    Raises:
        InputError: No MoE, another number of names, no text, or features that are not finite.
    """
    progress = progress or Silent()
    tokens = sum(pieces.tokens for _, pieces in _cut(corpora, config))
    progress.start("expert similarity", tokens, "tokens")
    loaded = load_causal_lm(checkpoint, dtype=weights_type(config.precision, device), device=device)
    model: Any = loaded.base_model
    layers = [
        layer
        for layer, module in enumerate(model.layers)
        if hasattr(getattr(module.mlp, "experts", None), "gate_up_proj")
    ]
    if not layers:
        remedy = "has no layer of fused experts; give a Mixtral, Qwen2Moe or Qwen3Moe"
        raise InputError(Fault("checkpoint", str(checkpoint), remedy))
    experts, size = model.layers[layers[0]].mlp.experts.gate_up_proj.shape[:2]
    if len(names) != experts:
        raise InputError(Fault("names", list(names), f"the model has {experts} experts"))
    sizes = {"neurons": size // 2, "outputs": model.config.hidden_size}
    moments = _moments(layers, sizes, experts, config, device)
    collect_moe(model, split_batches(corpora, config), moments, progress=progress)
    return _results(moments, names, config)


def dense_similarity(
    checkpoints: Mapping[str, Path],
    batches: Iterable[PairedBatch],
    *,
    config: SimilarityConfig,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[PairSimilarity]:
    """Compare two dense models, each on its own hidden states of the same text.

    Args:
        checkpoints: Name to dense checkpoint, both of the same shape.
        batches: What they read, each with its own tokenizer.
        config: Precision, representations.
        device: Where the models run and sums are kept.
        progress: Hears of every batch, in rows; the caller starts it.

    Returns:
        One entry per layer and representation.

    Raises:
        InputError: Models of different shapes, no text, or features that are not finite.
    """
    dtype = weights_type(config.precision, device)
    models: list[Any] = [
        load_causal_lm(path, dtype=dtype, device=device).base_model for path in checkpoints.values()
    ]
    first, second = models
    raise_faults(_shape_faults(list(checkpoints)[1], second.config, first.config))
    sizes = {"neurons": first.config.intermediate_size, "outputs": first.config.hidden_size}
    moments = _moments(range(first.config.num_hidden_layers), sizes, 2, config, device)
    collect_dense((first, second), batches, moments, progress=progress or Silent())
    return _results(moments, list(checkpoints), config)


def _cut(corpora: Sequence[Path], config: SimilarityConfig) -> list[tuple[TokenCorpus, Any]]:
    splits = [TokenCorpus(path) for path in corpora]
    length, tokens = config.sequence_length, config.tokens
    cut = [
        (corpus, paragraphs(corpus, sequence_length=length, max_tokens=tokens)) for corpus in splits
    ]
    remedy = "it has no paragraph to compare experts on; add text"
    raise_faults(
        Fault("corpus", str(corpus.directory), remedy) for corpus, pieces in cut if not len(pieces)
    )
    return cut


def _shape_faults(name: str, other: Any, first: Any) -> Iterator[Fault]:
    for size in ("num_hidden_layers", "hidden_size", "intermediate_size"):
        value, wanted = getattr(other, size), getattr(first, size)
        if value != wanted:
            remedy = f"the first model has {wanted}; compare models of one shape"
            yield Fault(f"checkpoints.{name}.{size}", value, remedy)


def _moments(
    layers: Sequence[int],
    sizes: Mapping[str, int],
    streams: int,
    config: SimilarityConfig,
    device: str,
) -> dict[Key, StreamMoments]:
    return {
        (layer, representation): StreamMoments(streams, sizes[representation], device=device)
        for layer in layers
        for representation in config.representations
    }


def _results(
    moments: Mapping[Key, StreamMoments], names: Sequence[str], config: SimilarityConfig
) -> list[PairSimilarity]:
    raise_faults(
        Fault(f"features.{layer}.{representation}", names[stream], "not finite; it is broken")
        for (layer, representation), counted in moments.items()
        for stream in counted.non_finite()
    )
    if any(not counted.rows for counted in moments.values()):
        raise InputError(Fault("batches", 0, "no position was compared; give text"))
    return [
        PairSimilarity(
            layer=layer,
            representation=representation,
            first=names[first],
            second=names[second],
            rows=counted.rows,
            features=counted.size,
            **vars(likeness),
        )
        for (layer, representation), counted in moments.items()
        for (first, second), likeness in compare(counted, best=config.best).items()
    ]
