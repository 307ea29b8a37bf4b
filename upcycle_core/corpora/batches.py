"""Token ids as models take them: packed for training, cut into paragraphs for everything else.

Shapes: S sequence length, B batch, N paragraphs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from upcycle_core.config import Counted
from upcycle_core.corpora.mixture import Turns, weight_faults, weighted_turns
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.seeded import permutation
from upcycle_core.errors import Fault, raise_faults

NO_LOSS = -100
"""A label that is not predicted."""
PAD_ID = 0
"""Stands right of shorter texts. Any token does: nothing sees it there, and it is not counted."""
SHORTEST_PARAGRAPH = 8
"""Tokens. A shorter rest of a document is left out: its states have next to no context."""


Index = TypeVar("Index", int, np.ndarray)


class PackedSequences(Dataset):
    """Sequences of S tokens, each a pure function of the seed and its index.

    Each domain is an endless stream: all its documents in a seeded order, an end token after each,
    then all of them again in another order. It is cut into sequences, and about one pass of them at
    a time is drawn in a seeded order, so that a batch holds text of many documents. Of every
    D sequences, each domain gives one, or its share by ``weights``.
    """

    def __init__(
        self,
        corpora: Sequence[TokenCorpus],
        *,
        sequence_length: int,
        count: int,
        seed: int,
        weights: Sequence[float] | None = None,
        loss: Counted = "all",
    ) -> None:
        shares = [1.0] * len(corpora) if weights is None else list(weights)
        raise_faults(weight_faults(shares, len(corpora)))
        raise_faults(
            Fault("corpus", str(corpus.directory), "it holds no tokens to train on; add text")
            for corpus, share in zip(corpora, shares, strict=True)
            if share and not len(corpus.tokens)
        )
        raise_faults(
            Fault("corpus", str(corpus.directory), "it holds no response to train on; add some")
            for corpus, share in zip(corpora, shares, strict=True)
            if share and loss == "responses" and not corpus.responses.any()
        )
        self.corpora = tuple(corpora)
        self.sequence_length = sequence_length
        self.count = count
        self.seed = seed
        self.weights = shares
        self.loss = loss
        self._orders: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._rounds: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor | dict[str, Tensor]:
        """Token ids ``[S]`` int64 of one sequence; with loss on responses also its ``labels``."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        domain, turn = self._turn(index)
        place = self._place(domain, turn)
        ids = self._sequence(domain, place)
        if self.loss == "all":
            return torch.from_numpy(ids)
        # A prompt may be longer than a sequence: the next one with a response is taken in its turn.
        for following in range(place + 1, place + 1 + 2 * self._sequences(domain)):
            if (ids[1:] >= 0).any():
                break
            ids = self._sequence(domain, following)
        return {
            "input_ids": torch.from_numpy(np.where(ids < 0, ~ids, ids)),
            "labels": torch.from_numpy(np.where(ids < 0, NO_LOSS, ids)),
        }

    def _turn(self, index: int) -> tuple[int, int]:
        """Which domain gives a sequence, and how many it has given before."""
        if len(set(self.weights)) > 1:
            return int(self._turns.corpus[index]), int(self._turns.turn[index])
        # What weighted_turns would find, without walking there.
        turn, place = divmod(index, len(self.corpora))
        return int(permutation(len(self.corpora), self.seed, "turn", turn)[place]), turn

    @cached_property
    def _turns(self) -> Turns:
        return weighted_turns(self.weights, self.count, seed=self.seed)

    def _sequences(self, domain: int) -> int:
        """Sequences of about one pass over a domain's text."""
        corpus = self.corpora[domain]
        return max(1, (len(corpus.tokens) + len(corpus)) // self.sequence_length)

    def _sequence(self, domain: int, place: int) -> np.ndarray:
        start = place * self.sequence_length
        return self._stream(domain, start, start + self.sequence_length)

    def _place(self, domain: int, turn: int) -> int:
        """Which sequence of its stream a domain gives at its ``turn``."""
        size = self._sequences(domain)
        number, place = divmod(turn, size)
        if self._rounds.get(domain, (None,))[0] != number:
            drawn = permutation(size, self.seed, "round", domain, number)
            self._rounds[domain] = (number, drawn)
        return number * size + int(self._rounds[domain][1][place])

    def _stream(self, domain: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of a domain's stream, int64; ``~id`` where is no loss."""
        corpus = self.corpora[domain]
        total = len(corpus.tokens) + len(corpus)
        parts = []
        while start < stop:
            epoch, inside = divmod(start, total)
            amount = min(stop - start, total - inside)
            parts.append(self._epoch(domain, epoch, inside, inside + amount))
            start += amount
        return np.concatenate(parts)

    def _epoch(self, domain: int, epoch: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of one pass over a domain's documents, int64."""
        corpus, counts_all = self.corpora[domain], self.loss == "all"
        read = corpus.document if counts_all else corpus.marked
        order, ends = self._order(domain, epoch)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left"))
        pieces: list[np.ndarray] = []
        for place in range(first, last + 1):
            document = order[place]
            is_learnt = counts_all or corpus.ends_response(document)
            end = corpus.eos_id if is_learnt else ~corpus.eos_id
            begin = int(ends[place - 1]) if place else 0
            text = read(document, max(start - begin, 0), stop - begin)
            pieces += [text, np.array([end] if ends[place] <= stop else [], dtype=np.int64)]
        return np.concatenate(pieces, dtype=np.int64)

    def _order(self, domain: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of one pass and where each ends, its end token included."""
        if (domain, epoch) not in self._orders:
            corpus = self.corpora[domain]
            # What is drawn at one time lies in two passes at most, or in one after the other.
            for old in [key for key in self._orders if key[0] == domain and key[1] < epoch - 1]:
                del self._orders[old]
            order = permutation(len(corpus), self.seed, "epoch", domain, epoch)
            ends = np.cumsum(np.diff(corpus.offsets)[order] + 1)
            self._orders[domain, epoch] = (order, ends)
        return self._orders[domain, epoch]


def packed_sequences(
    corpora: Sequence[TokenCorpus],
    *,
    sequence_length: int,
    count: int,
    seed: int,
    weights: Sequence[float] | None = None,
    loss: Counted = "all",
) -> PackedSequences:
    """Sequences for training, the same ones for the same seed wherever a run is resumed.

    Args:
        corpora: One split a domain; each gives every D-th sequence, or its share.
        sequence_length: S, in tokens.
        count: Sequences in all: steps x batch size x gradient accumulation.
        seed: Decides the order of documents and domains.
        weights: Share of each corpus, relative to the others, met within one sequence at every
            moment; 0 leaves a corpus out. None and equal weights give the same sequences.
        loss: On all tokens, or on the responses of chats alone.

    Returns:
        A map-style dataset of ``count`` tensors ``[S]`` int64; with loss on responses, of mappings
        of two of them, ``input_ids`` and ``labels`` (-100 elsewhere). No corpus repeats a window
        before it has given about all of its text.

    Raises:
        InputError: A corpus that has a share holds no tokens, or no responses where these are asked
            for; a weight is negative, or all are 0.
    """
    return PackedSequences(
        corpora, sequence_length=sequence_length, count=count, seed=seed, weights=weights, loss=loss
    )


class Paragraph(NamedTuple):
    """Tokens ``start`` to ``start + length`` of one document."""

    document: int
    start: int
    length: int


class Paragraphs(Sequence[Paragraph]):
    """Paragraphs in document order.

    Args:
        rows: ``[N, 3]`` int64: document, start, length.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Paragraph: ...
    @overload
    def __getitem__(self, index: slice) -> "Paragraphs": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return Paragraphs(self.rows[index])
        return Paragraph(*map(int, self.rows[index]))

    @property
    def tokens(self) -> int:
        """Tokens of all paragraphs."""
        return int(self.rows[:, 2].sum())


def paragraphs(
    corpus: TokenCorpus,
    *,
    sequence_length: int,
    max_tokens: int | None = None,
    window: int | None = None,
) -> Paragraphs:
    """Cut documents into paragraphs, before any forward pass.

    A rest shorter than ``SHORTEST_PARAGRAPH`` is left out (one shorter than ``sequence_length``, if
    that is less). For a causal model cutting is exact: what follows cannot change what was before.

    Args:
        corpus: The split.
        sequence_length: Tokens a paragraph at most.
        max_tokens: Stop, in document order, with the paragraph that reaches this many tokens. They
            are counted before ``window`` cuts, so that every window sees the same paragraphs.
        window: Keep the first tokens of each paragraph only (the paper's Figure 2a).

    Returns:
        Paragraphs in document order.
    """
    shortest = min(SHORTEST_PARAGRAPH, sequence_length)
    rows = []
    left = np.inf if max_tokens is None else max_tokens
    for document, size in enumerate(np.diff(corpus.offsets).tolist()):
        for start in range(0, size - shortest + 1, sequence_length):
            if left <= 0:
                break
            length = min(sequence_length, size - start)
            rows.append((document, start, length if window is None else min(window, length)))
            left -= length
    return Paragraphs(np.array(rows, dtype=np.int64).reshape(-1, 3))


def shard_of(pieces: Paragraphs, shard: int, shards: int) -> Paragraphs:
    """One of ``shards`` contiguous parts with about the same number of tokens.

    Args:
        pieces: All paragraphs.
        shard: Which part, from 0.
        shards: How many parts; together they are ``pieces``, in order.
    """
    ends = np.cumsum(pieces.rows[:, 2])
    middles = ends - pieces.rows[:, 2] / 2
    owner = middles * shards // max(pieces.tokens, 1)
    return Paragraphs(pieces.rows[owner == shard])


def fold_of(document: Index, folds: int) -> Index:
    """The fold that a document, or each of an array, belongs to with all its paragraphs."""
    return document % folds


@dataclass(frozen=True)
class Batch:
    """Right-padded paragraphs.

    Args:
        input_ids: ``[B, S]`` int64.
        attention_mask: ``[B, S]`` int64, 1 on tokens and 0 on padding.
        lengths: ``[B]`` int64, tokens of each paragraph.
        documents: ``[B]`` int64, the document of each paragraph.
        fold: The fold of all of them; 0 where there are no folds.
        responses: ``[B, S]`` int64, 1 on the tokens that alone are counted; None counts all.
    """

    input_ids: Tensor
    attention_mask: Tensor
    lengths: Tensor
    documents: Tensor
    fold: int
    responses: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """``[B, S]`` int64, 1 on tokens that are counted or scored."""
        return self.attention_mask if self.responses is None else self.responses


def paragraph_batches(
    corpus: TokenCorpus,
    pieces: Paragraphs,
    batch_size: int,
    pad_id: int = PAD_ID,
    *,
    folds: int | np.ndarray = 1,
    count: Counted = "all",
) -> Iterator[Batch]:
    """Batches of similar length, long ones first, each within one fold.

    The composition depends on the arguments alone, so that sums over batches are the same wherever
    they are computed.

    Args:
        corpus: The split that ``pieces`` were cut from.
        pieces: What to read.
        batch_size: B; a fold's last batch may be smaller.
        pad_id: What stands right of shorter paragraphs.
        folds: Parts that never share a batch: how many the documents are dealt to, or the part of
            each paragraph, [N] int.
        count: Which tokens are counted, or scored.

    Raises:
        InputError: Responses are asked for, and the split does not tell them.
    """
    rows = pieces.rows
    parts = fold_of(rows[:, 0], folds) if isinstance(folds, int) else folds
    for fold in range(int(parts.max(initial=0)) + 1):
        own = rows[parts == fold]
        own = own[np.argsort(-own[:, 2], kind="stable")]
        for first in range(0, len(own), batch_size):
            yield _batch(corpus, own[first : first + batch_size], pad_id, fold, count)


def _batch(corpus: TokenCorpus, rows: np.ndarray, pad_id: int, fold: int, count: Counted) -> Batch:
    documents, _, lengths = torch.from_numpy(rows).unbind(1)
    input_ids = torch.full((len(rows), int(lengths.max())), pad_id)
    for row, (document, start, length) in enumerate(rows.tolist()):
        text = corpus.document(document)[start : start + length]
        input_ids[row, :length] = torch.from_numpy(text.astype(np.int64))
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    responses = torch.zeros_like(mask) if count == "responses" else None
    if responses is not None:
        for row, (document, start, length) in enumerate(rows.tolist()):
            first = int(corpus.offsets[document]) + start
            marks = corpus.responses[first : first + length]
            responses[row, :length] = torch.from_numpy(marks.astype(np.int64))
    return Batch(input_ids, mask, lengths.clone(), documents.clone(), fold, responses)


def scored_tokens(corpus: TokenCorpus, pieces: Paragraphs, count: Counted = "all") -> np.ndarray:
    """How many tokens of each paragraph something predicts: all but the first. ``[N]`` int64.

    Args:
        corpus: The split that ``pieces`` were cut from.
        pieces: Paragraphs.
        count: Which tokens are counted at all.

    Raises:
        InputError: As ``paragraph_batches``.
    """
    if count == "all":
        return pieces.rows[:, 2] - 1
    return _of_responses(corpus, pieces, behind=1)


def counted_tokens(corpus: TokenCorpus, pieces: Paragraphs, count: Counted = "all") -> np.ndarray:
    """How many tokens of each paragraph are counted. ``[N]`` int64; as ``scored_tokens``."""
    if count == "all":
        return pieces.rows[:, 2]
    return _of_responses(corpus, pieces, behind=0)


def _of_responses(corpus: TokenCorpus, pieces: Paragraphs, *, behind: int) -> np.ndarray:
    """How many tokens of each paragraph's, behind its first ones, are of responses. ``[N]``."""
    first = corpus.offsets[pieces.rows[:, 0]] + pieces.rows[:, 1]
    last = first + pieces.rows[:, 2]
    # One by one: running sums would hold eight bytes of each token of the split.
    marks = corpus.responses
    counts = (
        np.count_nonzero(marks[start:end]) for start, end in zip(first + behind, last, strict=True)
    )
    return np.fromiter(counts, dtype=np.int64, count=len(first))
