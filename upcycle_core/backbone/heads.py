"""Attention heads under grouped queries: which head stands where, and in which basis it speaks.

A layer computes the same if whole KV groups change places, if query heads change places within
their group, and if a group's values are rotated where the o_proj columns of all its query heads
are rotated along. The axes within queries and keys carry rotary pairs and scales of q_norm and
k_norm, which all heads share: they stay as they are, and the norms with them.

Shapes: Q query heads, G KV groups of Q/G query heads each, N head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from upcycle_core.activations.cross import CrossMoments, orthogonal_map
from upcycle_core.architectures.axes import along, axes_of, layer_of
from upcycle_core.architectures.family import Family
from upcycle_core.backbone.rewrite import Transform

# What runs over values, not over keys; o_proj is known by its axes.
VALUES = (".v_proj.weight", ".v_proj.bias")


@dataclass(frozen=True, kw_only=True)
class HeadPairs:
    """What is known of every pair of query heads of one layer, anchor by stranger.

    Args:
        similarity: [Q, Q] fp64, at most 1; does not depend on the values' basis of either.
        products: [Q, Q, N, N] fp64: sum x y^T of what a rotation of values is to bring together.
        groups: G.
    """

    similarity: Tensor
    products: Tensor
    groups: int


@dataclass(frozen=True, kw_only=True)
class HeadMove:
    """How the heads of one layer of the stranger are changed.

    Args:
        groups: [G] int64, place to the KV group that comes to stand there.
        queries: [Q] int64, place to the query head that comes to stand there, group by group.
        rotations: [G, N, N] fp64, by place: values v become v R.
        before: Mean similarity of query heads of the same number.
        after: Mean similarity of those that stand opposite now.
    """

    groups: Tensor
    queries: Tensor
    rotations: Tensor
    before: float
    after: float


def pairs_from_activations(moments: CrossMoments, *, heads: int, groups: int) -> HeadPairs:
    """Compare what heads say: the input of o_proj on the same tokens.

    Two heads are as similar as the best rotation of values makes them: the nuclear norm of their
    cross-moments, over both root sums of squares.

    Args:
        moments: Of o_proj's input [.., Q N] in both models.
        heads: Q.
        groups: G.
    """
    size = moments.size // heads
    products = moments.products.view(heads, size, heads, size).transpose(1, 2)
    norms = moments.squares.view(2, heads, size).sum(-1).sqrt()
    nuclear = torch.linalg.svdvals(products).sum(-1)
    scale = (norms[0][:, None] * norms[1]).clamp_min(torch.finfo(nuclear.dtype).tiny)
    return HeadPairs(similarity=nuclear / scale, products=products, groups=groups)


def match_heads(pairs: HeadPairs) -> HeadMove:
    """Nested assignment: groups by the best that their query heads can do, heads within a group.

    Args:
        pairs: Of one layer.

    Returns:
        The change that brings the stranger's heads to the anchor's.
    """
    heads, groups = len(pairs.similarity), pairs.groups
    each = heads // groups
    blocks = pairs.similarity.view(groups, each, groups, each).transpose(1, 2)
    inner = torch.empty(groups, groups, each, dtype=torch.int64)
    totals = torch.empty(groups, groups, dtype=torch.float64)
    for ours in range(groups):
        for theirs in range(groups):
            block = blocks[ours, theirs]
            inner[ours, theirs] = _solve(block)
            totals[ours, theirs] = block.gather(1, inner[ours, theirs][:, None]).sum()
    order = _solve(totals)
    chosen = inner[torch.arange(groups), order]
    queries = (order[:, None] * each + chosen).flatten()
    every = torch.arange(heads)
    products = pairs.products[every, queries].unflatten(0, (groups, each)).sum(1)
    return HeadMove(
        groups=order,
        queries=queries,
        rotations=orthogonal_map(products),
        before=float(pairs.similarity[every, every].mean()),
        after=float(pairs.similarity[every, queries].mean()),
    )


def move_heads(family: Family, moves: Mapping[int, HeadMove]) -> Transform:
    """Put heads in other places and turn their values; the model computes what it computed.

    Args:
        family: Of the model.
        moves: By layer; layers that are not there stay as they are.

    Returns:
        Name and tensor to the changed tensor.
    """

    def move(name: str, tensor: Tensor) -> Tensor:
        layer = layer_of(name)
        if layer is None or layer not in moves:
            return tensor
        chosen, letters = moves[layer], axes_of(family, name)
        # Within a query's and a key's head nothing moves: rotary pairs stay pairs.
        turned = name.endswith(VALUES) or letters == "HQ"
        each = len(chosen.queries) // len(chosen.groups)
        rotations = chosen.rotations if turned else None
        tensor = along(
            tensor, letters, "K", lambda t, axis: _move(t, axis, chosen.groups, rotations)
        )
        spread = None if rotations is None else rotations.repeat_interleave(each, 0)
        return along(tensor, letters, "Q", lambda t, axis: _move(t, axis, chosen.queries, spread))

    return move


def _move(tensor: Tensor, axis: int, order: Tensor, rotations: Tensor | None) -> Tensor:
    """Reorder heads along ``axis``; then a vector x over head i's axis becomes x R_i."""
    heads = tensor.unflatten(axis, (len(order), -1)).index_select(axis, order)
    if rotations is not None:
        # Heads and their axis last: [.., heads, N].
        last = heads.movedim((axis, axis + 1), (-2, -1))
        last = torch.einsum("...hn,hnm->...hm", last, rotations.to(tensor.dtype))
        heads = last.movedim((-2, -1), (axis, axis + 1))
    return heads.flatten(axis, axis + 1)


def _solve(similarity: Tensor) -> Tensor:
    """Row to column of the assignment with the largest total."""
    _, columns = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
    return torch.from_numpy(columns)
