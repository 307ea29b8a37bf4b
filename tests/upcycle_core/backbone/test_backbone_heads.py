"""Heads in other places and other bases: exact changes, and matches against slow searches."""

from itertools import permutations, product

import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from tests.upcycle_core.backbone.rewritten import (
    VARIANTS,
    difference,
    pico_reader,
    random_move,
    rewritten,
)
from upcycle_core.activations.cross import CrossMoments
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.backbone.heads import (
    HeadPairs,
    match_heads,
    move_heads,
    pairs_from_activations,
)

GROUPED = [
    *VARIANTS,
    ("llama", {"num_key_value_heads": 1}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
]


def shape(overrides: dict) -> tuple[int, int, int]:
    """Query heads, groups, head size of a pico model."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    defaults = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    heads, groups, size = ({**defaults, **overrides}[name] for name in names)
    return heads, groups, size


@pytest.mark.parametrize(("family", "overrides"), GROUPED)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_moved_heads_computes_what_it_computed(tmp_path, family, overrides, tied):
    reader = pico_reader(tmp_path / "model", family, tie_word_embeddings=tied, **overrides)
    moves = {layer: random_move(*shape(overrides), seed=layer + 1) for layer in (0, 1)}
    moved = rewritten(reader, tmp_path / "moved", [move_heads(FAMILIES[family], moves)])
    assert difference(reader, moved) <= 1e-4
    changed = {n for n in reader.tensors if not torch.equal(reader.tensor(n), moved.tensor(n))}
    assert all(".self_attn." in name for name in changed)
    assert not any(name.endswith(("_norm.weight", "o_proj.bias")) for name in changed)
    assert any(name.endswith("v_proj.weight") for name in changed)
    if family == "qwen2":
        assert any(name.endswith("v_proj.bias") for name in changed)


def test_queries_and_keys_move_as_whole_heads(tmp_path):
    reader = pico_reader(tmp_path, "qwen2")
    move = random_move(4, 2, 8, seed=3)
    transform = move_heads(FAMILIES["qwen2"], {1: move})
    for part, order in (("q", move.queries), ("k", move.groups)):
        for kind in ("weight", "bias"):
            name = f"model.layers.1.self_attn.{part}_proj.{kind}"
            before = reader.tensor(name)
            heads, found = (t.view(len(order), 8, -1) for t in (before, transform(name, before)))
            for place, head in enumerate(order.tolist()):
                assert torch.equal(found[place], heads[head])
    other = "model.layers.0.self_attn.q_proj.weight"
    assert transform(other, reader.tensor(other)).equal(reader.tensor(other))


def plain_match(similarity: torch.Tensor, groups: int) -> list[int]:
    """The slow way: every order of groups, every order of heads in each."""
    each = len(similarity) // groups
    inner = list(permutations(range(each)))
    candidates = (
        [g * each + i for g, order in zip(outer, orders, strict=True) for i in order]
        for outer in permutations(range(groups))
        for orders in product(inner, repeat=groups)
    )
    return max(candidates, key=lambda c: sum(float(similarity[i, j]) for i, j in enumerate(c)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (6, 2), (4, 4), (4, 1)])
def test_the_nested_match_is_the_best_of_all(seed, heads, groups):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(heads, heads, generator=generator, dtype=torch.float64)
    products = torch.rand(heads, heads, 3, 3, generator=generator, dtype=torch.float64)
    found = match_heads(HeadPairs(similarity=similarity, products=products, groups=groups))
    queries = plain_match(similarity, groups)
    assert found.queries.tolist() == queries
    each = heads // groups
    assert found.groups.tolist() == [q // each for q in queries[::each]]
    total = sum(float(similarity[i, j]) for i, j in enumerate(queries))
    assert found.after == pytest.approx(total / heads, abs=1e-12)
    assert found.before == pytest.approx(float(similarity.trace()) / heads, abs=1e-12)
    for group in range(groups):
        # One rotation for all heads of a group: the best for the sum of what they say.
        places = range(group * each, (group + 1) * each)
        total_NN = sum(products[i, queries[i]] for i in places)
        expected, _ = orthogonal_procrustes(torch.eye(3).double().numpy(), total_NN.T.numpy())
        torch.testing.assert_close(
            found.rotations[group], torch.from_numpy(expected), rtol=0, atol=1e-9
        )


def test_heads_are_as_alike_as_the_best_rotation_makes_what_they_say():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    moments = CrossMoments(32)
    moments.update(x.flatten(1), y.flatten(1))
    pairs = pairs_from_activations(moments, heads=4, groups=2)
    for i in range(4):
        for j in range(4):
            rotation, _ = orthogonal_procrustes(y[:, j].numpy(), x[:, i].numpy())
            turned = y[:, j] @ torch.from_numpy(rotation)
            cosine = float((x[:, i] * turned).sum() / (x[:, i].norm() * turned.norm()))
            assert float(pairs.similarity[i, j]) == pytest.approx(cosine, abs=1e-12)
            torch.testing.assert_close(pairs.products[i, j], x[:, i].T @ y[:, j])


def test_silent_heads_are_like_nothing():
    moments = CrossMoments(32)
    moments.update(torch.zeros(5, 32), torch.ones(5, 32))
    pairs = pairs_from_activations(moments, heads=4, groups=2)
    assert not pairs.similarity.any()
    move = match_heads(pairs)
    assert sorted(move.queries.tolist()) == [0, 1, 2, 3]
    eye = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(move.rotations @ move.rotations.mT, eye.expand(2, 8, 8))
