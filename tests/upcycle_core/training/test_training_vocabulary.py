"""Embedding and head in parts, against stock models that one process holds whole."""

import pytest
import torch

from tests.pico import save_pico
from tests.upcycle_core.training.dividing import VOCABULARY, ends, text_of
from tests.upcycle_core.training.together import Group, said, together
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling

WORKERS, PADDING = 3, 5
CASES: dict[str, dict] = {
    "untied": {},
    "tied": {},
    "among": {"among": torch.tensor(71)},
    "bf16": {"bf16": True},
    "deltas": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, size = tmp_path_factory.mktemp("models"), {"vocab_size": VOCABULARY}
    size["pad_token_id"] = PADDING  # whose row of the embedding learns nothing
    tied = save_pico(folder / "tied", tie_word_embeddings=True, **size)
    untied = save_pico(folder / "untied", tie_word_embeddings=False, **size)
    low, size = DersUpcyclingConfig(codec="low_rank", rank=4), {"experts": 3, "top_k": 2}
    write_ders_upcycling(
        untied, folder / "deltas", config=low, seed=5, max_shard_bytes=10**9, **size
    )
    own = {"tied": tied, "deltas": folder / "deltas"}
    return {name: own.get(name, untied) for name in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("divided")
    calls = [(models[name], name, options) for name, options in CASES.items()]
    together(folder, Group(WORKERS, calls, ends))
    return folder


def whole(model, rank, *, among=None, bf16=False):
    """A worker's loss, and gradients, of the stock model and its own logits."""
    network = load_causal_lm(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = network(**text_of(rank), num_items_in_batch=among, use_cache=False).loss
    (2.5 * loss).backward()
    return loss.detach(), {name: p.grad for name, p in network.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_whole(models, folder, name):
    """Each worker's loss is its own text's; a gradient is the mean of the workers'."""
    losses, gradients = zip(
        *(whole(models[name], rank, **CASES[name]) for rank in range(WORKERS)), strict=True
    )
    near = {"rtol": 0.03, "atol": 2e-2} if name == "bf16" else {"rtol": 1e-4, "atol": 1e-6}
    for rank in range(WORKERS):
        found, _ = said(folder, name, rank)
        assert not isinstance(found, str), found
        assert found["rows"] == (33, 33, 31)[rank]
        torch.testing.assert_close(
            found["loss"], losses[rank], rtol=1e-2 if name == "bf16" else 1e-5, atol=0
        )
        torch.testing.assert_close(found["again"], found["loss"], rtol=1e-6, atol=0)
        assert set(found["gradients"]) == set(gradients[0])
        for parameter, gradient in found["gradients"].items():
            expected = torch.stack([own[parameter] for own in gradients]).mean(0)
            torch.testing.assert_close(gradient, expected, **near, msg=parameter)
            if name == "untied" and "embed" in parameter:
                assert not gradient[PADDING].any()
                assert gradient.any(1).sum() > 20
