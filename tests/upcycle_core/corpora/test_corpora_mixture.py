"""Shares of a mixture: exact at every moment, well spread, and a function of seed and index."""

import pickle
from fractions import Fraction

import pytest

from tests.upcycle_core.corpora.test_corpora_batches import (
    corpus_of,
    drawn_from,
    random_documents,
    stream_of,
)
from upcycle_core.corpora.batches import packed_sequences
from upcycle_core.corpora.mixture import weighted_turns
from upcycle_core.errors import InputError

MIXTURES = [
    (3, 1),
    (0.5, 0.3, 0.2),
    (0.7, 0.1, 0.1, 0.1),
    (1, 1, 1),
    (5, 0, 2, 0),
    (1, 100),
    (0.123, 4.56, 7.8, 9, 0.4),
]


def slow_turns(weights, count):
    """Who may give the n-th sequence, in fractions and from the definition alone.

    Of the corpora that would not run ahead by one, the one that would first lag behind by one if
    it were passed over until then.
    """
    total = sum(Fraction(str(weight)) for weight in weights)
    shares = [Fraction(str(weight)) / total for weight in weights]
    given = [0] * len(weights)
    for n in range(count):
        allowed = []
        for d, share in enumerate(shares):
            if share and given[d] + 1 - (n + 1) * share < 1:
                rows = n
                while rows * share - given[d] < 1:
                    rows += 1
                allowed.append((rows, d))
        soonest = min(allowed)[0]
        chosen = yield {d for rows, d in allowed if rows == soonest}
        given[chosen] += 1


@pytest.mark.parametrize("weights", MIXTURES)
def test_turns_are_those_of_the_slow_schedule(weights):
    turns = weighted_turns(weights, 150, seed=3)
    schedule = slow_turns(weights, 151)
    choices = next(schedule)
    for chosen in turns.corpus.tolist():
        assert chosen in choices
        choices = schedule.send(chosen)


@pytest.mark.parametrize("weights", MIXTURES)
def test_shares_are_met_within_one_at_every_moment(weights):
    count = 700
    turns = weighted_turns(weights, count, seed=1)
    total = sum(Fraction(str(weight)) for weight in weights)
    given = [0] * len(weights)
    for n, (corpus, turn) in enumerate(zip(turns.corpus, turns.turn, strict=True), start=1):
        assert turn == given[corpus]
        given[corpus] += 1
        for d, weight in enumerate(weights):
            assert abs(given[d] - n * Fraction(str(weight)) / total) < 1


def test_a_longer_schedule_begins_with_the_shorter_and_the_seed_decides_among_equals():
    weights = (2, 1, 1, 2)
    short, long = weighted_turns(weights, 40, seed=7), weighted_turns(weights, 400, seed=7)
    assert short.corpus.tolist() == long.corpus.tolist()[:40]
    others = {tuple(weighted_turns(weights, 40, seed=s).corpus.tolist()) for s in range(10)}
    assert len(others) == 10


@pytest.fixture
def texts():
    """Three corpora whose tokens tell where they come from."""
    return [
        [[1000 * domain + token % 1000 + 2 for token in ids] for ids in random_documents(domain)]
        for domain in range(3)
    ]


@pytest.fixture
def corpora(tmp_path, texts):
    return [corpus_of(tmp_path / str(d), documents) for d, documents in enumerate(texts)]


def rows_of(corpora, count=300, seed=5, **options):
    dataset = packed_sequences(corpora, sequence_length=16, count=count, seed=seed, **options)
    return [dataset[i].tolist() for i in range(count)]


def test_no_weights_and_equal_weights_give_the_same_sequences(corpora):
    expected = rows_of(corpora)
    assert rows_of(corpora, weights=[0.3, 0.3, 0.3]) == expected
    owners = [min((max(row) - 2) // 1000, 2) for row in expected]
    assert weighted_turns((1, 1, 1), 300, seed=5).corpus.tolist() == owners


def test_each_corpus_gives_its_share_of_its_own_stream_without_repeats(corpora, texts):
    weights = (0.6, 0.3, 0.1)
    rows = rows_of(corpora, weights=weights)
    owners = weighted_turns(weights, 300, seed=5).corpus.tolist()
    assert [owners.count(d) for d in range(3)] == [180, 90, 30]
    for domain, documents in enumerate(texts):
        own = [row for row, owner in zip(rows, owners, strict=True) if owner == domain]
        size = sum(len(ids) + 1 for ids in documents) // 16
        rounds = -(-len(own) // size)
        stream = stream_of(documents, 5, domain, rounds * size * 16)
        assert own == drawn_from(stream, 16, size, 5, domain)[: len(own)]


def test_a_weighted_sequence_depends_on_seed_and_index_alone(corpora):
    options = {"sequence_length": 16, "count": 200, "seed": 3, "weights": (3, 2, 1)}
    dataset = packed_sequences(corpora, **options)
    backwards = {i: dataset[i].tolist() for i in reversed(range(200))}
    fresh = pickle.loads(pickle.dumps(packed_sequences(corpora, **options)))
    assert all(fresh[i].tolist() == backwards[i] for i in (0, 199, 7, 100))


def test_a_corpus_left_out_may_be_empty(tmp_path, corpora):
    empty = corpus_of(tmp_path / "empty", [])
    rows = rows_of([*corpora, empty], weights=(1, 0, 2, 0))
    assert not any(1002 <= token < 2002 for row in rows for token in row)
    with pytest.raises(InputError, match="no tokens to train on"):
        rows_of([*corpora, empty], weights=(1, 0, 2, 1))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, -0.5, 1), "weights = -0.5: a share is a number from 0 upwards"),
        ((1, float("nan"), 1), "weights = nan"),
        ((0, 0, 0), "they leave every corpus out"),
        ((1, 1), "give one for each of the 3 corpora"),
    ],
)
def test_faulty_weights_are_refused(corpora, weights, message):
    with pytest.raises(InputError, match=message):
        rows_of(corpora, weights=weights)
