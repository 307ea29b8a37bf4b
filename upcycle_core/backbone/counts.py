"""Embedding rows weighted by how often each domain's text has the token.

An expert has learnt the rows of the tokens that it has met. An average dilutes them with the rows
of experts that have not:

    row_v = sum_d w_dv E_d[v] / sum_d w_dv,    w_dv = c_dv / sum_u c_du + FLOOR

where c_dv counts token v in domain d's text. Rows of tokens that no domain has are the average.

Shapes: V vocabulary, H hidden size, D domains.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from upcycle_core.backbone.write import common_type
from upcycle_core.checkpoints.reader import CHUNK, CheckpointReader
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.errors import Fault, InputError

FLOOR = 1e-6
"""Added to frequencies: what no domain's text holds is averaged. 1e-5 to 1e-7 score the same."""
TOKENS_AT_ONCE = 1 << 24


def token_counts(corpus: Path, vocabulary_size: int) -> Tensor:
    """How often each token stands in a tokenised split.

    Args:
        corpus: The split's directory.
        vocabulary_size: V.

    Returns:
        [V] int64.

    Raises:
        InputError: It holds no tokens, or one that the vocabulary does not have.
    """
    tokens = TokenCorpus(corpus).tokens
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        found = np.bincount(tokens[start : start + TOKENS_AT_ONCE], minlength=vocabulary_size)
        if len(found) > vocabulary_size:
            remedy = f"holds token {len(found) - 1} of a vocabulary of {vocabulary_size}; run the "
            raise InputError(Fault("corpus", str(corpus), f"{remedy}corpus stage again"))
        counts += found
    if not counts.any():
        raise InputError(Fault("corpus", str(corpus), "holds no tokens to count; give it text"))
    return torch.from_numpy(counts)


def frequencies(counts: Sequence[Tensor]) -> Tensor:
    """w_dv of each domain's counts [V].

    Returns:
        [D, V] fp64, all above 0.
    """
    return torch.stack([own.double() / own.sum() for own in counts]) + FLOOR


def row_weights(counts: Sequence[Tensor]) -> Tensor:
    """w_dv over their sum.

    Returns:
        [D, V] fp64; every column sums to one.
    """
    weights_DV = frequencies(counts)
    return weights_DV / weights_DV.sum(0)


def weighted_pieces(
    readers: Sequence[CheckpointReader], name: str, weights_DV: Tensor
) -> Iterator[Tensor]:
    """Yield the weighted mean of one matrix over checkpoints, some rows at a time.

    Summed in fp32 in their order. Nothing of the matrix's size is held.

    Args:
        readers: The checkpoints, in the order of the weights.
        name: A matrix [V, H] that all of them hold.
        weights_DV: As of ``row_weights``.

    Yields:
        Rows [n, H] in the narrowest type that holds all of theirs, of V in all.
    """
    sources, dtype = [reader.tensor(name) for reader in readers], common_type(readers)
    height, width = sources[0].shape
    step = max(1, CHUNK // width)
    for start in range(0, height, step):
        rows = slice(start, start + step)
        total = torch.zeros(sources[0][rows].shape)
        for source, weights_V in zip(sources, weights_DV, strict=True):
            total += weights_V[rows, None].float() * source[rows].float()
        yield total.to(dtype)
