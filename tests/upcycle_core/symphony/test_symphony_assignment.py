"""Which neuron goes where, against every permutation tried one by one."""

from itertools import permutations

import pytest
import torch

from upcycle_core.activations.cross import CrossMoments, Similarity, similarity
from upcycle_core.symphony.assignment import assign


def alike(
    matrix: torch.Tensor, dead_first: tuple[int, ...] = (), dead_second: tuple[int, ...] = ()
) -> Similarity:
    dead = torch.zeros(2, len(matrix), dtype=torch.bool)
    dead[0, list(dead_first)], dead[1, list(dead_second)] = True, True
    return Similarity(matrix=matrix, dead_first=dead[0], dead_second=dead[1])


def random_matrix(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, size, generator=generator, dtype=torch.float64)


def best_permutation(matrix: torch.Tensor) -> tuple[int, ...]:
    """The slow way: the one of all permutations with the largest sum."""
    places = range(len(matrix))
    return max(permutations(places), key=lambda order: sum(matrix[i, order[i]] for i in places))


@pytest.mark.parametrize("seed", range(5))
def test_the_assignment_is_the_best_of_all_permutations(seed):
    matrix = random_matrix(6, seed)
    found = assign(alike(matrix))
    order = best_permutation(matrix)
    assert found.order.tolist() == list(order)
    after = sum(float(matrix[i, order[i]]) for i in range(6)) / 6
    assert found.after == pytest.approx(after, abs=1e-12)
    assert found.before == pytest.approx(float(matrix.trace()) / 6, abs=1e-12)
    assert found.moved == sum(place != neuron for place, neuron in enumerate(order))
    assert found.aligned == 6


@pytest.mark.parametrize("kind", ["cosine", "correlation", "l2"])
def test_a_shuffled_noisy_copy_is_put_in_order(kind):
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(300, 20, generator=generator) + 0.3
    shuffle = torch.randperm(20, generator=generator)
    y_TI = (x_TI + 0.3 * torch.randn(300, 20, generator=generator))[:, shuffle]
    moments = CrossMoments(20)
    moments.update(x_TI, y_TI)
    assert torch.equal(assign(similarity(moments, kind)).order, shuffle.argsort())


def test_a_fraction_aligns_the_most_similar_pairs_and_keeps_the_order_of_the_rest():
    matrix = torch.zeros(5, 5, dtype=torch.float64)
    for place, (neuron, value) in enumerate([(3, 0.9), (4, 0.5), (0, 0.8), (1, 0.4), (2, 0.3)]):
        matrix[place, neuron] = value
    orders = {part: assign(alike(matrix), fraction=part) for part in (0.0, 0.4, 0.6, 1.0)}
    assert orders[0.0].order.tolist() == [0, 1, 2, 3, 4]
    assert orders[0.0].moved == 0
    assert orders[0.4].order.tolist() == [3, 1, 0, 2, 4]  # places 0 and 2, then 1, 2, 4 in order
    assert orders[0.6].order.tolist() == [3, 4, 0, 1, 2]  # the rest happens to fit
    assert orders[1.0].order.tolist() == [3, 4, 0, 1, 2]
    assert [found.aligned for found in orders.values()] == [0, 2, 3, 5]
    assert orders[0.4].after == pytest.approx((0.9 + 0.8) / 5, abs=1e-12)


def test_dead_neurons_are_paired_last_and_kept():
    matrix = random_matrix(6, 3)
    matrix[2], matrix[:, 0], matrix[:, 5] = 0, 0, 0
    found = assign(alike(matrix, (2,), (0, 5)))
    assert sorted(found.order.tolist()) == list(range(6))
    assert (found.dead_anchor, found.dead, found.aligned) == (1, 2, 4)
    assert found.order[2] in (0, 5)
    dead_places = [place for place in range(6) if found.order[place] in (0, 5)]
    assert [int(found.order[place]) for place in dead_places] == [0, 5]
    living = [place for place in range(6) if place != 2]
    best = max(
        sum(
            float(matrix[place, neuron]) for place, neuron in zip(places, (1, 2, 3, 4), strict=True)
        )
        for places in permutations(living, 4)
    )
    assert found.after == pytest.approx(best / 6, abs=1e-12)


def test_a_dead_neuron_is_not_chosen_though_distance_would():
    matrix = -random_matrix(4, 1) - 1
    matrix[3, 3] = 0.0  # both silent: the distance is none
    found = assign(Similarity(matrix=matrix, **dict(_dead(4, 3))), fraction=0.75)
    assert found.aligned == 3
    assert sorted(found.order[:3].tolist()) == [0, 1, 2]
    assert found.order[3] == 3


def _dead(size: int, neuron: int):
    for name in ("dead_first", "dead_second"):
        yield name, torch.arange(size) == neuron


def test_nothing_alive_leaves_the_order():
    found = assign(alike(torch.zeros(3, 3, dtype=torch.float64), (0, 1, 2), (0, 1, 2)))
    assert found.order.tolist() == [0, 1, 2]
    assert (found.aligned, found.moved) == (0, 0)


def test_a_fraction_is_a_share():
    with pytest.raises(ValueError, match=r"fraction = 80: choose 0 to 1"):
        assign(alike(random_matrix(3)), fraction=80)
