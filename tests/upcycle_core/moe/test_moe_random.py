import pytest
import torch

from upcycle_core.moe.random import random_routers


def test_random_routers_follow_their_seed():
    first, again, other = (random_routers(2, 64, 5, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[layer], again[layer]) for layer in (0, 1))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
    assert first[0].shape == (64, 5)
    assert first[0].std() == pytest.approx(0.02, rel=0.2)


def test_the_spread_of_random_routers_can_be_chosen():
    narrow, wide = (random_routers(1, 64, 5, std=std, seed=1)[0] for std in (0.01, 1.0))
    assert torch.allclose(100 * narrow, wide)
