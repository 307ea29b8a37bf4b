"""Calibration text of all domains as two models read it, token beside token (Symphony-MoE).

S longest sequence, B batch, P paired positions.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from upcycle_core.activations.pairs import PairedBatch
from upcycle_core.checkpoints.tokenizer import load_tokenizer, vocabulary_fingerprint
from upcycle_core.corpora.batches import PAD_ID
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.encoding import prefix_ids
from upcycle_core.corpora.reader import read_documents
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.symphony.config import CalibrationConfig


class Window(NamedTuple):
    """A piece of a document in both models' tokens.

    Args:
        first: [n] int64 ids of the first model.
        second: [m] int64 ids of the second.
        places: [p, 2] int64, ascending: positions in ``first`` and in ``second`` that end at the
            same place of the text.
    """

    first: np.ndarray
    second: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairedTexts:
    """The same amount of every domain's text, ready for ``activations.pairs.collect_pairs``.

    Args:
        windows: Of all domains, one domain after another.
        tokens: Domain to its tokens in the first model's counting; the same number for each.
        pairs: Domain to its paired positions.
        batch_size: B.
    """

    windows: Sequence[Window]
    tokens: Mapping[str, int]
    pairs: Mapping[str, int]
    batch_size: int

    def batches(self) -> Iterator[PairedBatch]:
        """Windows of similar length together, long ones first, whatever their domain."""
        longest = [max(len(window.first), len(window.second)) for window in self.windows]
        order = np.argsort(-np.array(longest), kind="stable")
        for start in range(0, len(order), self.batch_size):
            yield _batch([self.windows[i] for i in order[start : start + self.batch_size]])


def paired_texts(
    texts: Mapping[str, Path],
    first: Path,
    second: Path,
    *,
    config: CalibrationConfig,
    bos: Bos = "auto",
) -> PairedTexts:
    """Read the beginning of every domain's text and pair both models' tokens.

    Documents keep their stored order and are cut where both tokenizers end a token, so that no
    window exceeds S tokens of either; a stretch without such a place that is longer is left out.
    If the vocabularies are one, both models get the first one's ids and every token is paired.
    Otherwise tokens are paired whose ends in the text coincide: what a model says behind a token
    then depends on the same text. A beginning-of-sequence token is read, and never paired. Of chats
    what is said is read, for two templates have no places in common.

    Args:
        texts: Domain to the Parquet file of its documents (``corpora.documents``).
        first: A directory with the tokenizer of the first model (the anchor), which counts.
        second: One with the tokenizer of the second.
        config: Amount, S and B. If some domain has fewer than ``tokens``, every domain gives as
            many as the smallest has.
        bos: Whether a beginning-of-sequence token stands before each document, as either model is
            trained and scored.

    Raises:
        InputError: A domain has no tokens that can be paired; all such domains. ``bos`` is
            ``always``, and a tokenizer has no such token.
    """
    one = vocabulary_fingerprint(first) == vocabulary_fingerprint(second)
    cutters = _core(first), None if one else _core(second)
    before = [np.array(prefix_ids(load_tokenizer(p), bos), dtype=np.int64) for p in (first, second)]
    found = {
        domain: _beginning(path, *cutters, before=before, config=config)
        for domain, path in texts.items()
    }
    raise_faults(
        Fault(f"calibration.domains.{domain}", str(texts[domain]), "holds no text: give it some")
        for domain, windows in found.items()
        if not windows
    )
    share = min(sum(len(window.first) for window in windows) for windows in found.values())
    kept = {domain: _shortened(windows, share) for domain, windows in found.items()}
    return PairedTexts(
        windows=[window for windows in kept.values() for window in windows],
        tokens=dict.fromkeys(kept, share),
        pairs={domain: sum(len(w.places) for w in windows) for domain, windows in kept.items()},
        batch_size=config.batch_size,
    )


def _core(directory: Path) -> Tokenizer:
    """The tokenizer without what it does after cutting, which moves the ends of tokens.

    A special token's name in a text stays ordinary text, as in ``corpora.shards``.
    """
    backend = load_tokenizer(directory).backend_tokenizer
    core = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"post_processor": None}))
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = True
    return core


def _beginning(
    path: Path,
    first: Tokenizer,
    second: Tokenizer | None,
    *,
    before: Sequence[np.ndarray],
    config: CalibrationConfig,
) -> list[Window]:
    """The first windows that have ``tokens`` of the first model, or all there are.

    Args:
        path: The documents.
        first: Cuts for the first model.
        second: Cuts for the second; None if it reads the same ids.
        before: Ids that stand before a text, of either.
        config: S and how many tokens are enough.
    """
    windows: list[Window] = []
    found = 0
    for text in read_documents(path):
        ours = first.encode(text, add_special_tokens=False)
        theirs = second.encode(text, add_special_tokens=False) if second else None
        for window in _windows(ours, theirs, before, config.sequence_length):
            windows.append(window)
            found += len(window.first)
        if found >= config.tokens:
            break
    return _shortened(windows, config.tokens)


def _windows(
    first: Encoding, second: Encoding | None, before: Sequence[np.ndarray], size: int
) -> Iterator[Window]:
    """The windows of one document; without ``second`` both models read the first's ids."""
    read = (np.array((e or first).ids, dtype=np.int64) for e in (first, second))
    ours, theirs = (np.concatenate(ids) for ids in zip(before, read, strict=True))
    if second is None:
        places = np.arange(len(first.ids))[:, None].repeat(2, axis=1)
    else:
        places = _paired(_spans(first), _spans(second))
    places = places + np.array([len(ids) for ids in before])
    ends = places + 1
    start, done = np.zeros(2, dtype=np.int64), 0
    while done < len(ends):
        # Both columns ascend: windows end at the last place that is near enough in either.
        upto = int(min(np.searchsorted(ends[:, k], start[k] + size, side="right") for k in (0, 1)))
        if upto > done:
            stop = ends[upto - 1]
            yield Window(
                ours[start[0] : stop[0]], theirs[start[1] : stop[1]], places[done:upto] - start
            )
        else:  # nothing within reach: go on behind the next place
            stop, upto = ends[done], done + 1
        start, done = stop, upto


def _spans(encoding: Encoding) -> np.ndarray:
    """Start and end of each token [n, 2], in characters of the text."""
    return np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)


def _paired(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Positions [p, 2] of tokens whose spans [n, 2], [m, 2] end at the same place of the text."""
    (ours, our_ends), (theirs, their_ends) = _ending(first), _ending(second)
    _, i, j = np.intersect1d(our_ends, their_ends, assume_unique=True, return_indices=True)
    return np.stack([ours[i], theirs[j]], axis=1)


def _ending(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that end at an end of a character, and where; each place once, ascending.

    A token that holds a part of a character's bytes has the whole character's span, and so has a
    space that sentencepiece puts before a text: there the next token starts before this one ends.
    """
    starts, ends = spans[:, 0], spans[:, 1]
    whole = ends > starts
    whole[:-1] &= starts[1:] >= ends[:-1]
    positions = np.flatnonzero(whole)
    return positions, ends[positions]


def _shortened(windows: Sequence[Window], tokens: int) -> list[Window]:
    """The first windows that have ``tokens`` of the first model together, the last one cut."""
    kept = []
    for window in windows:
        if tokens <= 0:
            break
        length = min(tokens, len(window.first))
        places = window.places[window.places[:, 0] < length]
        kept.append(Window(window.first[:length], window.second, places))
        tokens -= length
    return kept


def _batch(windows: Sequence[Window]) -> PairedBatch:
    """Pad windows on the right; positions become rows of the flattened batch."""
    first_ids, first_mask = _padded([window.first for window in windows])
    second_ids, second_mask = _padded([window.second for window in windows])
    widths = np.array([first_ids.shape[1], second_ids.shape[1]])
    rows = np.concatenate([window.places + i * widths for i, window in enumerate(windows)])
    return PairedBatch(
        first_ids=first_ids,
        first_mask=first_mask,
        second_ids=second_ids,
        second_mask=second_mask,
        first_rows=torch.from_numpy(rows[:, 0].copy()),
        second_rows=torch.from_numpy(rows[:, 1].copy()),
    )


def _padded(sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Ids [B, S] and mask [B, S] of sequences of several lengths."""
    rows = [torch.from_numpy(sequence) for sequence in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
