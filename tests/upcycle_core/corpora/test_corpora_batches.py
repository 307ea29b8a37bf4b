import pickle
import tracemalloc
from itertools import islice

import numpy as np
import pytest
import torch

from upcycle_core.corpora.batches import (
    SHORTEST_PARAGRAPH,
    counted_tokens,
    fold_of,
    packed_sequences,
    paragraph_batches,
    paragraphs,
    scored_tokens,
    shard_of,
)
from upcycle_core.corpora.chat_template import Encoded
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.seeded import permutation
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError

EOS, PAD = 0, 1


def corpus_of(directory, documents):
    sized = [(ids, len(ids)) for ids in documents]
    write_split(directory, sized, eos_id=EOS, vocabulary_size=2000)
    return TokenCorpus(directory)


def random_documents(seed, count=23, longest=40, low=2):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, longest, count)
    return [generator.integers(low, 2000, n).tolist() for n in lengths]


@pytest.fixture
def corpus(tmp_path):
    return corpus_of(tmp_path / "corpus", random_documents(0))


def stream_of(documents, seed, domain, tokens):
    """The slow obvious way: whole epochs, one after another."""
    stream, epoch = [], 0
    while len(stream) < tokens:
        for index in permutation(len(documents), seed, "epoch", domain, epoch):
            stream += [*documents[index], EOS]
        epoch += 1
    return stream[:tokens]


def drawn_from(stream, length, size, seed, domain):
    """The slow obvious way: cut, then draw each round of ``size`` sequences in its order."""
    sequences = [stream[i : i + length] for i in range(0, len(stream), length)]
    rounds = [sequences[i : i + size] for i in range(0, len(sequences), size)]
    return [
        sequences[place]
        for number, sequences in enumerate(rounds)
        for place in permutation(size, seed, "round", domain, number)
    ]


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_packing_equals_concatenated_epochs_drawn_in_rounds(corpus, length):
    documents = random_documents(0)
    size = max(1, sum(len(ids) + 1 for ids in documents) // length)
    count = 4 * size
    dataset = packed_sequences([corpus], sequence_length=length, count=count, seed=5)
    stream = stream_of(documents, 5, 0, count * length)
    assert len(dataset) == count
    assert [s.tolist() for s in islice(dataset, count)] == drawn_from(stream, length, size, 5, 0)
    assert dataset[0].dtype == torch.int64


def test_batch_holds_text_of_many_documents(tmp_path):
    """Neighbours in one file say much the same: a batch of them would teach little."""
    corpus = corpus_of(tmp_path / "long", [[100 + i] * 640 for i in range(50)])
    dataset = packed_sequences([corpus], sequence_length=64, count=400, seed=0)
    documents = {int(dataset[i].max()) for i in range(16)}
    assert len(documents) >= 10


def test_a_sequence_depends_on_seed_and_index_alone(tmp_path, corpus):
    other = corpus_of(tmp_path / "other", random_documents(1))
    options = {"sequence_length": 16, "count": 400, "seed": 3}
    dataset = packed_sequences([corpus, other], **options)
    backwards = {i: dataset[i].tolist() for i in reversed(range(400))}
    fresh = pickle.loads(pickle.dumps(packed_sequences([corpus, other], **options)))
    assert all(fresh[i].tolist() == backwards[i] for i in (0, 399, 7, 200))
    assert packed_sequences([corpus, other], **{**options, "seed": 4})[0].tolist() != backwards[0]


def test_domains_have_equal_shares_at_every_moment(tmp_path):
    corpora = [
        corpus_of(tmp_path / str(domain), [[100 + domain] * 3] * (1 + 20 * domain))
        for domain in range(3)
    ]
    dataset = packed_sequences(corpora, sequence_length=12, count=300, seed=0)
    owners = [int(dataset[i].max()) - 100 for i in range(300)]
    turns = [tuple(owners[i : i + 3]) for i in range(0, 300, 3)]
    assert all(sorted(turn) == [0, 1, 2] for turn in turns)
    assert len(set(turns)) == 6


def test_each_domain_draws_from_its_own_stream(tmp_path):
    documents = [[1000 + token % 1000 for token in ids] for ids in random_documents(1)]
    low = [[2 + token % 900 for token in ids] for ids in random_documents(2)]
    corpora = [corpus_of(tmp_path / "high", documents), corpus_of(tmp_path / "low", low)]
    dataset = packed_sequences(corpora, sequence_length=64, count=60, seed=2)
    sequences = [dataset[i].tolist() for i in range(60)]
    for domain, texts in enumerate((documents, low)):
        own = [ids for ids in sequences if (max(ids) >= 1000) == (domain == 0)]
        size = sum(len(ids) + 1 for ids in texts) // 64
        rounds = -(-30 // size)
        stream = stream_of(texts, 2, domain, rounds * size * 64)
        assert own == drawn_from(stream, 64, size, 2, domain)[:30]


def test_sequences_end_with_the_count(corpus):
    dataset = packed_sequences([corpus], sequence_length=8, count=4, seed=0)
    assert len(list(islice(dataset, 10))) == 4
    with pytest.raises(IndexError):
        dataset[4]


def test_an_empty_corpus_cannot_be_packed(tmp_path):
    empty = corpus_of(tmp_path / "empty", [])
    with pytest.raises(InputError, match="no tokens to train on"):
        packed_sequences([empty], sequence_length=8, count=4, seed=0)


def naive_paragraphs(documents, length, max_tokens=None, window=None):
    rows, counted = [], 0
    for index, document in enumerate(documents):
        start = 0
        while start < len(document):
            piece = document[start : start + length]
            enough = max_tokens is not None and counted >= max_tokens
            if len(piece) >= min(SHORTEST_PARAGRAPH, length) and not enough:
                rows.append((index, start, len(piece[:window])))
                counted += len(piece)
            start += length
    return rows


@pytest.mark.parametrize("length", [3, 8, 16, 100])
@pytest.mark.parametrize("max_tokens", [None, 1, 100])
@pytest.mark.parametrize("window", [None, 2, 50])
def test_paragraphs_equal_the_naive_cut(corpus, length, max_tokens, window):
    found = paragraphs(corpus, sequence_length=length, max_tokens=max_tokens, window=window)
    expected = naive_paragraphs(random_documents(0), length, max_tokens, window)
    assert list(found) == expected
    assert found.tokens == sum(row[2] for row in expected)
    assert list(found[2:4]) == expected[2:4]


def test_paragraphs_stop_as_soon_as_the_tokens_are_reached(tmp_path):
    corpus = corpus_of(tmp_path / "corpus", [[2] * 100])
    cut = {n: len(paragraphs(corpus, sequence_length=10, max_tokens=n)) for n in (29, 30, 31)}
    assert cut == {29: 3, 30: 3, 31: 4}


def test_every_window_sees_the_same_paragraphs(corpus):
    cut = [
        paragraphs(corpus, sequence_length=16, max_tokens=120, window=window)
        for window in (2, 8, None)
    ]
    starts = [[(piece.document, piece.start) for piece in pieces] for pieces in cut]
    assert starts[0] == starts[1] == starts[2]


@pytest.mark.parametrize("shards", [1, 2, 5, 40])
def test_shards_are_contiguous_and_balanced(corpus, shards):
    pieces = paragraphs(corpus, sequence_length=16)
    parts = [shard_of(pieces, shard, shards) for shard in range(shards)]
    assert [piece for part in parts for piece in part] == list(pieces)
    assert all(abs(part.tokens - pieces.tokens / shards) <= 16 for part in parts)


def test_equal_paragraphs_are_shared_equally(tmp_path):
    corpus = corpus_of(tmp_path / "corpus", [[2] * 10] * 12)
    pieces = paragraphs(corpus, sequence_length=10)
    assert [len(shard_of(pieces, shard, 4)) for shard in range(4)] == [3, 3, 3, 3]


def test_no_paragraphs_give_empty_shards_and_no_batches(tmp_path):
    empty = corpus_of(tmp_path / "empty", [])
    pieces = shard_of(paragraphs(empty, sequence_length=16), 0, 2)
    assert len(pieces) == 0
    assert list(paragraph_batches(empty, pieces, 4, PAD)) == []


@pytest.mark.parametrize("folds", [1, 3])
def test_batches_hold_every_paragraph_once_right_padded(corpus, folds):
    pieces = paragraphs(corpus, sequence_length=16)
    documents = random_documents(0)
    expected = sorted(
        (piece.document, documents[piece.document][piece.start : piece.start + piece.length])
        for piece in pieces
    )
    found = []
    for batch in paragraph_batches(corpus, pieces, 4, PAD, folds=folds):
        assert batch.input_ids.dtype == torch.int64
        assert batch.input_ids.shape == batch.attention_mask.shape
        assert 1 <= len(batch.lengths) <= 4
        assert batch.input_ids.shape[1] == max(batch.lengths)
        for row, (document, length) in enumerate(zip(batch.documents, batch.lengths, strict=True)):
            found.append((int(document), batch.input_ids[row, :length].tolist()))
            assert (batch.input_ids[row, length:] == PAD).all()
            ones = [1] * int(length) + [0] * (batch.input_ids.shape[1] - int(length))
            assert batch.attention_mask[row].tolist() == ones
    assert sorted(found) == expected


def test_batches_never_mix_folds(corpus):
    pieces = paragraphs(corpus, sequence_length=16)
    batches = list(paragraph_batches(corpus, pieces, 4, PAD, folds=3))
    for batch in batches:
        assert {fold_of(int(document), 3) for document in batch.documents} == {batch.fold}
    assert {batch.fold for batch in batches} == {0, 1, 2}


def test_batches_hold_paragraphs_of_like_length_in_one_order(tmp_path):
    corpus = corpus_of(tmp_path / "corpus", [[2] * length for length in (10, 30, 20, 30, 10, 20)])
    batches = list(paragraph_batches(corpus, paragraphs(corpus, sequence_length=99), 2, PAD))
    assert [batch.documents.tolist() for batch in batches] == [[1, 3], [2, 5], [0, 4]]
    assert [batch.lengths.tolist() for batch in batches] == [[30, 30], [20, 20], [10, 10]]


def chats_of(directory, documents, seed=0):
    """Random tokens are responses."""
    draw = np.random.default_rng(seed)
    marked = [(ids, len(ids), (draw.random(len(ids)) < 0.4).tolist()) for ids in documents]
    write_split(directory, marked, eos_id=EOS, vocabulary_size=2000)
    return TokenCorpus(directory), [marks for _, _, marks in marked]


def test_loss_on_responses_leaves_prompts_and_separators_out(tmp_path):
    documents = [ids for ids in random_documents(1) if ids]
    corpus, marks = chats_of(tmp_path / "chats", documents)
    options = {"sequence_length": 16, "count": 60, "seed": 3}
    rows = packed_sequences([corpus], loss="responses", **options)
    labelled = [
        [token if mark else -100 for token, mark in zip(ids, own, strict=True)]
        for ids, own in zip(documents, marks, strict=True)
    ]
    size = (sum(map(len, documents)) + len(documents)) // 16
    stream = []
    for epoch in range(8):  # as stream_of, with no loss on the end tokens
        for index in permutation(len(documents), 3, "epoch", 0, epoch):
            stream += [*labelled[index], -100]
    expected = drawn_from(stream[: 16 * size * 3], 16, size, 3, 0)
    plain = packed_sequences([corpus], **options)
    compared = 0
    for row, ids, labels in zip(rows, plain, expected, strict=False):
        if set(labels[1:]) == {-100}:  # the next one is taken
            continue
        compared += 1
        assert torch.equal(row["input_ids"], ids)
        assert row["labels"].tolist() == labels
        assert row["labels"].dtype == row["input_ids"].dtype == torch.int64
    assert compared > 50
    assert pickle.loads(pickle.dumps(rows))[5]["labels"].tolist() == rows[5]["labels"].tolist()


def test_the_separator_is_learnt_where_a_response_has_no_end_token_of_its_own(tmp_path):
    """Else the model never learns to stop."""
    end = 7
    open_chat, ended, asks = [5, 6, 8], [5, 6, end], [5, 6, 9]
    chats = [
        Encoded(open_chat, 3, [False, True, True], is_open=True),
        Encoded(ended, 3, [False, True, True]),
        Encoded(asks, 3, [False, True, False]),
        Encoded([], 0, []),
    ]
    write_split(tmp_path, chats, eos_id=EOS, vocabulary_size=2000)
    options = {"sequence_length": 13, "count": 4, "seed": 3, "loss": "responses"}
    for row in packed_sequences([TokenCorpus(tmp_path)], **options):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        learnt = {ids[i - 1] for i in range(1, 13) if ids[i] == EOS and labels[i] == EOS}
        assert learnt == {8}
        assert ids.count(EOS) == 4


def test_every_sequence_has_a_response_though_prompts_are_longer_than_it(tmp_path):
    draw = np.random.default_rng(0)
    chats = [(draw.integers(1, 99, 84).tolist(), 84, [False] * 80 + [True] * 4) for _ in range(9)]
    write_split(tmp_path, chats, eos_id=EOS, vocabulary_size=2000)
    options = {"sequence_length": 16, "count": 60, "seed": 3, "loss": "responses"}
    rows = packed_sequences([TokenCorpus(tmp_path)], **options)
    assert all((row["labels"][1:] != -100).any() for row in rows)
    assert len({tuple(row["input_ids"].tolist()) for row in rows}) > 9
    again = pickle.loads(pickle.dumps(rows))
    assert all(torch.equal(again[i]["labels"], rows[i]["labels"]) for i in (41, 3, 59))


@pytest.mark.parametrize("loss", ["all", "responses"])
def test_a_sequence_reads_of_a_long_document_what_it_holds_alone(tmp_path, loss):
    ids = np.random.default_rng(0).integers(2, 2000, 1_000_003).tolist()
    marked = [([5] * 9, 9, [True] * 9), (ids, len(ids), [True] * len(ids))]
    write_split(tmp_path, marked, eos_id=EOS, vocabulary_size=2000)
    dataset = packed_sequences(
        [TokenCorpus(tmp_path)], sequence_length=64, count=1000, seed=0, loss=loss
    )
    assert dataset[0] is not None  # what is drawn once for a pass is there
    tracemalloc.start()
    try:
        for i in range(1, 20):
            _ = dataset[i]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(ids) / 4


def test_loss_on_responses_needs_some(tmp_path, corpus):
    options = {"sequence_length": 16, "count": 1, "seed": 0, "loss": "responses"}
    with pytest.raises(InputError, match="do not say which of their tokens are responses"):
        packed_sequences([corpus], **options)
    write_split(tmp_path / "no", [([5] * 9, 9, [False] * 9)], eos_id=EOS, vocabulary_size=2000)
    with pytest.raises(InputError, match="it holds no response to train on"):
        packed_sequences([TokenCorpus(tmp_path / "no")], **options)
    chats, _ = chats_of(tmp_path / "chats", [[7] * 30])
    packed_sequences([corpus, chats], weights=[0.0, 1.0], **options)


def test_batches_count_responses_alone_where_these_are_asked_for(tmp_path):
    documents = random_documents(2)
    corpus, marks = chats_of(tmp_path / "chats", documents)
    pieces = paragraphs(corpus, sequence_length=16)
    found = {}
    for batch in paragraph_batches(corpus, pieces, 4, PAD, count="responses"):
        assert batch.counted.dtype == torch.int64
        assert not (batch.counted > batch.attention_mask).any()
        for row, (document, length) in enumerate(zip(batch.documents, batch.lengths, strict=True)):
            own = batch.counted[row, :length].bool().tolist()
            found.setdefault(int(document), []).append((batch.input_ids[row, :length], own))
    for piece, scored in zip(pieces, scored_tokens(corpus, pieces, "responses"), strict=True):
        own = marks[piece.document][piece.start : piece.start + piece.length]
        assert own in [counted for _, counted in found[piece.document]]
        assert scored == sum(own[1:])
    for batch in paragraph_batches(corpus, pieces, 4, PAD):
        assert batch.counted is batch.attention_mask


@pytest.mark.parametrize(("counted", "behind"), [(counted_tokens, 0), (scored_tokens, 1)])
def test_responses_are_counted_in_less_memory_than_their_marks(tmp_path, counted, behind):
    draw = np.random.default_rng(0)
    marks = [draw.integers(0, 2, n).astype(bool).tolist() for n in (100_003, 60_000, 9, 140_001)]
    chats = [Encoded([5] * len(own), len(own), responses=own) for own in marks]
    write_split(tmp_path / "chats", chats, eos_id=EOS, vocabulary_size=2000)
    corpus = TokenCorpus(tmp_path / "chats")
    pieces = paragraphs(corpus, sequence_length=2048)
    expected = [sum(marks[d][s + behind : s + n]) for d, s, n in pieces.rows.tolist()]
    assert corpus.responses.any()  # mapped
    tracemalloc.start()
    try:
        found = counted(corpus, pieces, "responses")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.dtype, found.tolist()) == (np.int64, expected)
    assert peak < sum(map(len, marks))
