"""The pass itself: forward paragraphs, count router inputs.

Shapes: B paragraphs a batch, S tokens a paragraph, padded on the right.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from upcycle_core.activations.capture import router_inputs
from upcycle_core.activations.moments import Moments
from upcycle_core.corpora.batches import (
    Batch,
    Paragraphs,
    paragraph_batches,
    paragraphs,
    shard_of,
)
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """What is kept apart in a statistics file."""

    hidden_size: int
    """H."""
    layers: tuple[int, ...]
    """Layers whose router inputs were counted."""
    folds: int
    """Parts by document, for cross-validation."""
    position_buckets: tuple[int, ...] = ()
    """Ascending token windows: (2, 16) keeps positions 0-1, 2-15 and the rest apart."""

    @property
    def cell_count(self) -> int:
        """Cells of each layer's moments: folds times position buckets."""
        return self.folds * (len(self.position_buckets) + 1)

    def cell(self, fold: int, bucket: int) -> int:
        """Where tokens of ``fold`` at positions of ``bucket`` are counted."""
        return fold * (len(self.position_buckets) + 1) + bucket

    def cells(self, *, folds: Sequence[int] | None = None, window: int | None = None) -> list[int]:
        """The cells that make up ``folds`` and the first ``window`` positions (all by default).

        Raises:
            InputError: ``window`` is not one of the position buckets.
        """
        if window is not None and window not in self.position_buckets:
            remedy = f"these statistics keep apart {list(self.position_buckets)}; add it there"
            raise InputError(Fault("statistics.position_buckets", window, remedy))
        buckets = len(self.position_buckets) + 1
        if window is not None:
            buckets = self.position_buckets.index(window) + 1
        chosen = range(self.folds) if folds is None else folds
        return [self.cell(fold, bucket) for fold in chosen for bucket in range(buckets)]


class Counted(NamedTuple):
    """Which tokens of a batch are counted where."""

    cell: int
    rows: Tensor | None
    """Rows of the flattened batch; None for all of them."""

    def to(self, device: torch.device | str) -> "Counted":
        """The same for features on ``device``."""
        return self if self.rows is None else Counted(self.cell, self.rows.to(device))


def collect_shard(
    model: "PreTrainedModel",
    corpus: Path,
    layers: Sequence[int],
    *,
    config: StatisticsConfig,
    shard: int,
    progress: Progress,
    what: str,
) -> tuple[Layout, dict[int, Moments]]:
    """Forward one shard of a split and count the router inputs of ``layers``.

    Args:
        model: A decoder without lm_head.
        corpus: The split's directory.
        layers: Which layers; nothing behind the last one is computed.
        config, shard, progress: As for ``statistics.domain_statistics``.
        what: How progress names this.

    Returns:
        What is kept apart, and moments by layer.
    """
    layout = Layout(model.config.hidden_size, tuple(layers), config.parts, config.position_buckets)
    batches, count = shard_batches(corpus, config, shard)
    progress.start(what, count, "tokens")
    return layout, collect(model, batches, layout, device=model.device, progress=progress)


def read_paragraphs(corpus: TokenCorpus, config: StatisticsConfig) -> Paragraphs:
    """What ``config`` reads of a split, all shards together."""
    return paragraphs(
        corpus,
        sequence_length=config.sequence_length,
        max_tokens=config.tokens,
        window=config.window,
    )


def shard_batches(
    corpus: Path, config: StatisticsConfig, shard: int
) -> tuple[Iterator[Batch], int]:
    """The batches of one shard of a split, each within one fold, and how many tokens they have."""
    tokens = TokenCorpus(corpus)
    pieces = shard_of(read_paragraphs(tokens, config), shard, config.shards)
    size, count = config.batch_size, config.count
    return paragraph_batches(tokens, pieces, size, folds=config.parts, count=count), pieces.tokens


def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    layout: Layout,
    *,
    device: torch.device | str,
    progress: Progress,
) -> dict[int, Moments]:
    """Forward every batch once and count the router inputs of every layer in ``layout``.

    Args:
        model: A decoder without lm_head, on ``device``.
        batches: Padded on the right, each within one fold.

    Returns:
        Moments by layer, a cell for each fold and position bucket.
    """
    moments = {
        layer: Moments(layout.hidden_size, cells=layout.cell_count, device=device)
        for layer in layout.layers
    }
    counted: list[Counted] = []

    def consume(layer: int, x_BSH: Tensor) -> None:
        for cell, rows in counted:
            moments[layer].update(x_BSH, rows=rows, cell=cell)

    with torch.inference_mode(), router_inputs(model, consume, layers=layout.layers):
        for batch in batches:
            of_batch = counted_tokens(batch.counted, batch.fold, layout)
            counted[:] = [tokens.to(device) for tokens in of_batch]
            # causal attention hides padding on the right from every counted token: without a mask
            # attention runs its fast path
            model(input_ids=batch.input_ids.to(device), use_cache=False)
            progress.advance(int(batch.attention_mask.sum()))
    return moments


def counted_tokens(mask_BS: Tensor, fold: int, layout: Layout) -> list[Counted]:
    """Sort a batch's tokens into position buckets; what is not counted goes nowhere.

    Args:
        mask_BS: 1 on tokens that are counted, 0 elsewhere and on padding on the right.
    """
    mask_BS = mask_BS.bool()
    edges = (0, *layout.position_buckets, mask_BS.shape[1])
    counted = []
    for bucket, (start, end) in enumerate(pairwise(edges)):
        inside_BS = torch.zeros_like(mask_BS)
        inside_BS[:, start:end] = mask_BS[:, start:end]
        rows = inside_BS.flatten().nonzero().flatten()
        if len(rows) == mask_BS.numel():
            counted.append(Counted(layout.cell(fold, bucket), None))
        elif len(rows):
            counted.append(Counted(layout.cell(fold, bucket), rows))
    return counted
