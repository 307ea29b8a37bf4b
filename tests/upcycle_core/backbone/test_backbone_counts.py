"""Rows weighted by counts, against the sum written out."""

import numpy as np
import pytest
import torch

from tests.pico import save_pico
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.backbone.average import average_tensors, write_backbone
from upcycle_core.backbone.config import MergeConfig
from upcycle_core.backbone.counts import row_weights, token_counts, weighted_pieces
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError


def write_text(directory, tokens, size=96):
    write_split(directory, [(np.array(tokens), 4)], eos_id=0, vocabulary_size=size)
    return directory


def slow_rows(readers, name, counts):
    """Token by token, in Python's numbers."""
    rows = []
    sources = [reader.tensor(name).tolist() for reader in readers]
    for token in range(len(sources[0])):
        weights = [own[token] / sum(own) + 1e-6 for own in counts]
        row = [
            sum(w * s[token][column] for w, s in zip(weights, sources, strict=True)) / sum(weights)
            for column in range(len(sources[0][0]))
        ]
        rows.append(row)
    return torch.tensor(rows)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [CheckpointReader(save_pico(root / str(seed), seed=seed)) for seed in range(3)]


COUNTS = ([0, 9, 1, *[0] * 92, 5], [0, 0, 3, *[0] * 92, 5], [0, 1, 0, *[0] * 92, 90])


@pytest.mark.parametrize("at_once", [1, 64, 1 << 20])
def test_rows_are_the_weighted_mean(readers, at_once, monkeypatch):
    monkeypatch.setattr("upcycle_core.backbone.counts.CHUNK", at_once)
    weights = row_weights([torch.tensor(own) for own in COUNTS])
    found = torch.cat(list(weighted_pieces(readers, EMBEDDING, weights)))
    torch.testing.assert_close(found, slow_rows(readers, EMBEDDING, COUNTS), atol=1e-5, rtol=0)
    # a token of nobody's text
    torch.testing.assert_close(found[7], average_tensors(readers, EMBEDDING)[7])


def test_a_token_of_one_domain_is_its_experts_row(readers):
    weights = row_weights([torch.tensor(own) for own in ([8, 0], [4, 4], [8, 0])])
    assert weights[1, 1] == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(weights.sum(0), torch.ones(2, dtype=torch.float64))


def test_tokens_are_counted_in_pieces(tmp_path, monkeypatch):
    text = write_text(tmp_path / "text", [3, 3, 5, 3, 7])
    for at_once in (2, 100):
        monkeypatch.setattr("upcycle_core.backbone.counts.TOKENS_AT_ONCE", at_once)
        counts = token_counts(text, 96)
        assert {n: int(c) for n, c in enumerate(counts) if c} == {3: 3, 5: 1, 7: 1}


def test_what_cannot_be_counted_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds token 95 of a vocabulary of 90"):
        token_counts(write_text(tmp_path / "large", [95]), 90)
    write_split(tmp_path / "none", [], eos_id=0, vocabulary_size=96)
    with pytest.raises(InputError, match="holds no tokens to count"):
        token_counts(tmp_path / "none", 96)


@pytest.mark.parametrize("weighed", ["embeddings", "head"])
def test_each_matrix_is_merged_as_its_word_says(readers, weighed, tmp_path):
    counts = [torch.tensor(own) for own in COUNTS]
    merge = MergeConfig(**{weighed: "counts"})
    write_backbone(readers, tmp_path, max_shard_bytes=10**9, merge=merge, counts=counts)
    made = CheckpointReader(tmp_path)
    own = {"embeddings": EMBEDDING, "head": LM_HEAD}[weighed]
    for name in made.tensors:
        expected = slow_rows(readers, name, COUNTS) if name == own else None
        if expected is None:
            expected = average_tensors(readers, name)
        torch.testing.assert_close(made.tensor(name), expected, atol=1e-5, rtol=0)
