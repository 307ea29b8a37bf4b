"""Measure checkpoints: paths in, plain numbers out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle_core.checkpoints.load import DTYPES, load_causal_lm
from upcycle_core.corpora.batches import Batch, paragraph_batches, paragraphs
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.similarity.cka import StreamMoments, compare
from upcycle_core.evaluation.similarity.collect import (
    Key,
    PairedBatch,
    collect_dense,
    collect_moe,
)
from upcycle_core.evaluation.similarity.config import Representation, SimilarityConfig
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
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[PairSimilarity]:
    """Compare every two experts of a MoE, each applied to every token of its layer's input.

    Args:
        checkpoint: Of a stock architecture (Mixtral, Qwen2Moe, Qwen3Moe).
        corpora: Tokenised splits for its vocabulary, one a domain.
        names: Of the experts, in order.
        config: Text and precision.
        layers: A group of layers, to bound memory (``StreamMoments`` says how much a layer holds);
            all that have experts by default. The results of groups are put one after the other.
        device: Where the model runs and sums are kept.
        progress: Hears of every batch, in tokens.

    Returns:
        One entry per layer, representation and two experts.

    Raises:
        InputError: No MoE, a layer without experts, another number of names, no text, or features
            that are not finite.
    """
    progress = progress or Silent()
    tokens = sum(pieces.tokens for _, pieces in _cut(corpora, config))
    progress.start("expert similarity", tokens, "tokens")
    loaded = load_causal_lm(checkpoint, dtype=DTYPES[config.precision], device=device)
    model: Any = loaded.base_model
    with_experts = [
        layer
        for layer, module in enumerate(model.layers)
        if hasattr(getattr(module.mlp, "experts", None), "gate_up_proj")
    ]
    chosen = with_experts if layers is None else list(layers)
    faults = [
        Fault("layers", layer, f"has no experts; choose among {with_experts}")
        for layer in chosen
        if layer not in with_experts
    ]
    if not with_experts:
        remedy = "has no layer of fused experts; give a Mixtral, Qwen2Moe or Qwen3Moe"
        faults = [Fault("checkpoint", str(checkpoint), remedy)]
    raise_faults(faults)
    experts, size = model.layers[chosen[0]].mlp.experts.gate_up_proj.shape[:2]
    if len(names) != experts:
        raise InputError(Fault("names", list(names), f"the model has {experts} experts"))
    sizes = {"neurons": size // 2, "outputs": model.config.hidden_size}
    moments = _moments(chosen, sizes, experts, config, device)
    collect_moe(model, split_batches(corpora, config), moments, progress=progress)
    return _results(moments, names, config)


def dense_similarity(
    checkpoints: Mapping[str, Path],
    batches: Iterable[PairedBatch],
    *,
    config: SimilarityConfig,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[PairSimilarity]:
    """Compare every two dense models, each on its own hidden states of the same text.

    Strangers whose tokenizers differ are given two by two, the results one after the other.

    Args:
        checkpoints: Name to dense checkpoint, all of the same shape.
        batches: What they read, in the order of ``checkpoints``. Where they share a vocabulary:
            ``same_for_all`` of each of ``split_batches``.
        config: Precision, representations.
        layers: A group of layers, to bound memory; all by default.
        device: Where the models run and sums are kept.
        progress: Hears of every batch, in rows; the caller starts it.

    Returns:
        One entry per layer, representation and two models.

    Raises:
        InputError: Models of different shapes, an unknown layer, no text, or features that are not
            finite.
    """
    dtype = DTYPES[config.precision]
    models: list[Any] = [
        load_causal_lm(path, dtype=dtype, device=device).base_model for path in checkpoints.values()
    ]
    first = models[0].config
    chosen = list(range(first.num_hidden_layers) if layers is None else layers)
    raise_faults(_shape_faults(checkpoints, models, chosen))
    sizes = {"neurons": first.intermediate_size, "outputs": first.hidden_size}
    moments = _moments(chosen, sizes, len(models), config, device)
    collect_dense(models, batches, moments, progress=progress or Silent())
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


def _shape_faults(
    checkpoints: Mapping[str, Path], models: Sequence[Any], layers: Sequence[int]
) -> list[Fault]:
    depth = models[0].config.num_hidden_layers
    faults = [
        Fault("layers", layer, f"choose 0 to {depth - 1}")
        for layer in layers
        if not 0 <= layer < depth
    ]
    for name, model in zip(checkpoints, models, strict=True):
        for size in ("num_hidden_layers", "hidden_size", "intermediate_size"):
            value, wanted = getattr(model.config, size), getattr(models[0].config, size)
            if value != wanted:
                remedy = f"the first model has {wanted}; compare models of one shape"
                faults.append(Fault(f"checkpoints.{name}.{size}", value, remedy))
    return faults


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
