"""What regressions on activations read: calibration text in two halves; and where they go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from upcycle_core.activations.regression import HALVES
from upcycle_core.activations.resume import LayersDone, digest_of
from upcycle_core.activations.stream import LayerStream
from upcycle_core.corpora.batches import (
    Batch,
    counted_tokens,
    fold_of,
    paragraph_batches,
)
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.dume.collect import read_paragraphs
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.errors import Fault, InputError

LEAST_SHARE = 0.25
"""Of what is counted, in the smaller half of the documents: a lambda that is judged on less, or
solved on less, is none for the text."""
UNDIVIDED = (
    "all that is counted stands in one paragraph, and what is solved on one half is judged on the "
    "other; give more text, or a shorter statistics.sequence_length"
)


def halves_of(documents: np.ndarray, counted: np.ndarray) -> np.ndarray | None:
    """The half of a text that each paragraph belongs to, [N] int64: that of its document.

    Where less than ``LEAST_SHARE`` of what is counted stands in one half, as with a single long
    document, halves are those of the paragraphs in their order.

    Args:
        documents: The document of each paragraph, [N] int64.
        counted: Its tokens that are counted, [N] int64.

    Returns:
        None where one of these too has nothing that is counted.
    """
    places = np.arange(len(documents)) * HALVES // max(1, len(documents))
    for halves, least in ((fold_of(documents, HALVES), LEAST_SHARE), (places, 0.0)):
        tokens = np.bincount(halves, weights=counted, minlength=HALVES)
        if tokens.min() >= max(1, least * tokens.sum()):
            return halves
    return None


def calibration_batches(corpus: Path, config: StatisticsConfig) -> list[Batch]:
    """What ``config`` reads of a split; each batch is of one of ``halves_of`` it.

    Raises:
        InputError: One paragraph alone holds what is counted.
    """
    tokens = TokenCorpus(corpus)
    pieces = read_paragraphs(tokens, config)
    counted = counted_tokens(tokens, pieces, config.count)
    halves = halves_of(pieces.rows[:, 0], counted)
    if halves is None:
        raise InputError(Fault("corpus", str(corpus), UNDIVIDED))
    size, count = config.batch_size, config.count
    return list(paragraph_batches(tokens, pieces, size, folds=halves, count=count))


def layers_done(
    out: Path, key: Any, streams: Sequence[LayerStream], texts: Sequence[Sequence[Batch]]
) -> LayersDone:
    """What a kill has left beside ``out`` of the same regression, layer by layer.

    Args:
        out: What is written in the end.
        key: What decides it beside weights and texts, as JSON holds it.
        streams: The models that the text goes through.
        texts: Batches of each domain.
    """
    every = [batch for batches in texts for batch in batches]
    mark = {
        "key": key,
        "batches": [len(batches) for batches in texts],
        "shapes": [[*batch.input_ids.shape, batch.fold] for batch in every],
        "texts": digest_of(x for batch in every for x in (batch.input_ids, batch.counted)),
        "weights": [stream.stamp for stream in streams],
        "dtypes": [str(stream.dtype) for stream in streams],
    }
    return LayersDone(out.with_name(f"{out.name}.layers"), mark)
