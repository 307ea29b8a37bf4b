"""A head fitted to all experts, against least squares row by row on stacked states."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pico import save_pico
from tests.upcycle_core.dume.test_dume_repair import EXACT, paragraphs_of, related, write_corpus
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.backbone.average import average_tensors, write_backbone
from upcycle_core.backbone.counts import frequencies
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.shared_head import RHO, final_moments, fitted_head
from upcycle_core.errors import InputError

V, H, D = 30, 6, 3


@pytest.fixture
def problem():
    """Heads, frequencies and final states of three domains; each has tokens that it alone uses."""
    draw = torch.Generator().manual_seed(0)
    heads = torch.randn(V, H, generator=draw) + 0.3 * torch.randn(D, V, H, generator=draw)
    counts = torch.randint(0, 50, (D, V), generator=draw) * (torch.rand(D, V, generator=draw) > 0.4)
    states = torch.randn(D, 40, H, generator=draw, dtype=torch.float64)
    mixing = torch.eye(H) + 0.2 * torch.randn(D, H, H, generator=draw, dtype=torch.float64)
    return heads, frequencies(list(counts)), states @ mixing


def slow_map(merged: Tensor, head: Tensor, weights: Tensor) -> Tensor:
    """P of one domain by least squares on the weighted rows, and on what keeps it near to 1."""
    centred = [w - (weights[:, None] * w).sum(0) / weights.sum() for w in (merged, head.double())]
    left, right = (weights.sqrt()[:, None] * w for w in centred)
    keep = (RHO * left.square().sum() / H).sqrt() * torch.eye(H, dtype=torch.float64)
    return torch.linalg.lstsq(torch.cat([left, keep]), torch.cat([right, keep])).solution


def slow_head(heads: Tensor, weights_DV: Tensor, states: Tensor, rounds: int) -> Tensor:
    """Every token's row by least squares on its logits of every state of every domain."""
    shares = weights_DV / weights_DV.sum(0)
    merged = torch.einsum("dv,dvh->vh", shares, heads.double())
    for _ in range(rounds):
        maps = [slow_map(merged, h, w) for h, w in zip(heads, weights_DV, strict=True)]
        for token in range(V):
            scale = (shares[:, token] / states.shape[1]).sqrt()
            mapped = torch.cat([s * n @ P.T for s, n, P in zip(scale, states, maps, strict=True)])
            wanted = torch.cat(
                [s * n @ h[token].double() for s, n, h in zip(scale, states, heads, strict=True)]
            )
            merged[token] = torch.linalg.lstsq(mapped, wanted[:, None]).solution[:, 0]
    return merged


def moments_of(states: Tensor) -> list[Tensor]:
    return [n.T @ n / len(n) for n in states]


@pytest.mark.parametrize(("at_once", "steps"), [(7, 100), (1 << 13, 100), (1 << 13, 3)])
@pytest.mark.parametrize("rounds", [1, 4])
def test_every_row_is_least_squares_on_logits(problem, rounds, at_once, steps, monkeypatch):
    """Whether conjugate gradients arrive (here they need a step a dimension, six) or not."""
    monkeypatch.setattr("upcycle_core.dume.shared_head.ROWS_AT_ONCE", at_once)
    monkeypatch.setattr("upcycle_core.dume.shared_head.STEPS", steps)
    heads, weights, states = problem
    found = fitted_head(list(heads), weights, moments_of(states), rounds=rounds)
    expected = slow_head(heads, weights, states, rounds)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_one_head_for_all_stays_as_it_is(problem):
    heads, weights, states = problem
    found = fitted_head([heads[0]] * D, weights, moments_of(states))
    torch.testing.assert_close(found, heads[0], atol=1e-6, rtol=1e-6)


def test_heads_that_differ_by_a_map_are_one_head(problem):
    """What the maps can say costs nothing: more rounds leave less of it."""
    heads, weights, states = problem
    turned = torch.linalg.qr(torch.randn(D, H, H, generator=torch.Generator().manual_seed(1)))[0]
    same = [heads[0] @ (0.9 * torch.eye(H) + 0.1 * q) for q in turned]

    def left(merged: Tensor) -> float:
        gaps = []
        for head, w, n in zip(same, weights, states, strict=True):
            P = slow_map(merged.double(), head, w)
            gaps.append(float(((n @ P.T @ merged.double().T - n @ head.double().T) ** 2).mean()))
        return sum(gaps)

    lefts = [left(fitted_head(same, weights, moments_of(states), rounds=n)) for n in (0, 1, 6)]
    assert lefts[2] < lefts[1] < lefts[0]
    assert lefts[2] < 0.5 * lefts[0]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_moments_are_those_of_what_the_head_reads(family, tmp_path):
    (expert,) = related(tmp_path, family, count=1)
    corpus = write_corpus(tmp_path / "text")
    model, states = load_causal_lm(expert, dtype=torch.float64), []
    with torch.no_grad():
        for _, ids in paragraphs_of(corpus):
            states.append(model.model(ids[None]).last_hidden_state[0])
    stacked = torch.cat(states)
    found = final_moments(expert, corpus, config=EXACT)
    torch.testing.assert_close(found, stacked.T @ stacked / len(stacked), atol=1e-9, rtol=1e-9)


def test_states_that_are_not_finite_are_refused(tmp_path):
    (expert,) = related(tmp_path, count=1)
    model = load_causal_lm(expert)
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    model.save_pretrained(expert)
    with pytest.raises(InputError, match="last states hold NaN"):
        final_moments(expert, write_corpus(tmp_path / "text"), config=EXACT)


def test_a_tied_model_gets_a_head_of_its_own(tmp_path):
    paths = [save_pico(tmp_path / str(s), seed=s, tie_word_embeddings=True) for s in (0, 1)]
    readers = [CheckpointReader(path) for path in paths]
    head = torch.from_numpy(np.random.default_rng(0).normal(size=(96, 32))).float()
    write_backbone(readers, tmp_path / "out", max_shard_bytes=10**9, head=head)
    made = CheckpointReader(tmp_path / "out")
    assert made.config["tie_word_embeddings"] is False
    torch.testing.assert_close(made.tensor(LM_HEAD), head)
    torch.testing.assert_close(made.tensor(EMBEDDING), average_tensors(readers, EMBEDDING))
