"""Deltas of D experts from one shared matrix: as sparse values, as few bits, or of low rank.

This file needs torch and transformers alone: it is copied beside the weights (see
``modeling_ders``).

T tokens, I input size, O output size, D deltas, n values of a sparse delta, r rank.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .configuration_ders import index_dtype, kept_entries, offset, unpack

_MASKED_COLUMNS = 256  # of D r: up to here low-rank deltas are computed for all and masked
_BLOCK_ENTRIES = 1 << 20  # of a sparse delta that are dense at a time


Shape = tuple[int, int, int]
Gradients = tuple[Tensor, Tensor]


class Rows(NamedTuple):
    """Which delta each of R rows goes through.

    Args:
        experts_R: int64 [R].
        counts: Rows of each delta, if rows lie sorted by delta.
    """

    experts_R: Tensor
    counts: list[int] | None = None

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Yield each delta that has rows, and which; rows are sorted."""
        start = 0
        for expert, count in enumerate(self.counts or ()):
            if count:
                yield expert, slice(start, start + count)
            start += count


def sort_rows(experts_R: Tensor, deltas: int) -> tuple[Tensor, Rows]:
    """Return the order [R] that sorts rows by their delta, and the rows in that order."""
    sorted_R, order_R = torch.sort(experts_R, stable=True)
    return order_R, Rows(sorted_R, torch.bincount(sorted_R, minlength=deltas).tolist())


class Delta(nn.Module, ABC):
    """What D experts differ in from one shared matrix [O, I].

    Args:
        shape: (D, O, I).
        bias: Whether there is an expert's own bias [D, O], which is used instead of the base's.
    """

    wants_sorted = True
    """Whether ``product`` and ``onto`` need rows that are sorted."""

    def __init__(self, shape: Shape, *, bias: bool) -> None:
        super().__init__()
        self.deltas, self.outputs, self.inputs = shape
        self.bias = nn.Parameter(torch.zeros(shape[:2])) if bias else None

    @abstractmethod
    def dense(self, expert: int) -> Tensor:
        """Return one delta as a matrix [O, I], without its bias."""

    def apply_one(self, x_TI: Tensor, expert: int) -> Tensor:
        """Return the product of every token with one delta, [T, O]; no bias."""
        return functional.linear(x_TI, self.dense(expert).to(x_TI.dtype))

    def product(self, x_RI: Tensor, rows: Rows) -> Tensor:
        """Return the product of every row with its delta, [R, O]; no bias."""
        pieces = [self.apply_one(x_RI[span], expert) for expert, span in rows.spans()]
        return torch.cat(pieces) if pieces else x_RI.new_zeros(0, self.outputs)

    def onto(self, base_RO: Tensor, x_RI: Tensor, rows: Rows) -> Tensor:
        """Return ``base_RO + product(x_RI, rows)``, in base's place if no gradient is wanted."""
        if torch.is_grad_enabled():
            return base_RO + self.product(x_RI, rows)
        for expert, span in rows.spans():
            base_RO[span] += self.apply_one(x_RI[span], expert)
        return base_RO

    def forward(self, x_TI: Tensor, experts_T: Tensor) -> Tensor:
        """Return the product of every token with its expert's delta.

        Args:
            x_TI: Inputs, in any order.
            experts_T: int64, the delta of each token.

        Returns:
            [T, O]; no bias.
        """
        if not self.wants_sorted:
            return self.product(x_TI, Rows(experts_T))
        order_T, rows = sort_rows(experts_T, self.deltas)
        y_TO = self.product(x_TI[order_T], rows)
        return torch.empty_like(y_TO).index_copy(0, order_T, y_TO)


class LowRankDelta(Delta):
    """delta_i = b_i a_i; a is random at first, b zero.

    While D r is small, a x is computed for all deltas and masked, which needs no sorting.
    """

    def __init__(self, shape: Shape, *, bias: bool, rank: int) -> None:
        super().__init__(shape, bias=bias)
        deltas, outputs, inputs = shape
        self.rank = rank
        self.wants_sorted = deltas * rank > _MASKED_COLUMNS
        bound = 1 / math.sqrt(inputs)
        self.a = nn.Parameter(torch.empty(deltas, rank, inputs).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(deltas, outputs, rank))

    def dense(self, expert: int) -> Tensor:
        return self.b[expert] @ self.a[expert]

    def apply_one(self, x_TI: Tensor, expert: int) -> Tensor:
        return functional.linear(functional.linear(x_TI, self.a[expert]), self.b[expert])

    def product(self, x_RI: Tensor, rows: Rows) -> Tensor:
        if self.wants_sorted:
            return super().product(x_RI, rows)
        return functional.linear(*self._masked(x_RI, rows.experts_R))

    def onto(self, base_RO: Tensor, x_RI: Tensor, rows: Rows) -> Tensor:
        if self.wants_sorted:
            return super().onto(base_RO, x_RI, rows)
        z_RC, b_OC = self._masked(x_RI, rows.experts_R)
        if torch.is_grad_enabled():
            return torch.addmm(base_RO, z_RC, b_OC.T)
        return base_RO.addmm_(z_RC, b_OC.T.to(base_RO.dtype))

    def _masked(self, x_RI: Tensor, experts_R: Tensor) -> tuple[Tensor, Tensor]:
        """a x of all deltas, zero but for each row's own [R, C = D r], and b of all [O, C]."""
        z_RC = functional.linear(x_RI, self.a.flatten(0, 1))
        own_RD = functional.one_hot(experts_R, self.deltas).to(z_RC.dtype)
        z_RDr = z_RC.unflatten(1, (self.deltas, self.rank)) * own_RD[:, :, None]
        return z_RDr.flatten(1), self.b.transpose(0, 1).flatten(1)


class SparseDelta(Delta):
    """delta_i is zero but for ``values[i]`` at the flat positions ``indices[i]``, row by row."""

    indices: Tensor

    def __init__(self, shape: Shape, *, bias: bool, drop_rate: float) -> None:
        super().__init__(shape, bias=bias)
        deltas, outputs, inputs = shape
        size = outputs * inputs
        kept = kept_entries(size, drop_rate)
        self.values = nn.Parameter(torch.zeros(deltas, kept))
        indices = torch.empty(deltas, kept, dtype=torch.int64)
        if indices.device.type != "meta":
            for row in indices:
                row.copy_(torch.randperm(size)[:kept].sort().values)
        self.register_buffer("indices", indices.to(index_dtype(size)))

    def dense(self, expert: int) -> Tensor:
        flat = self.values.new_zeros(self.outputs * self.inputs)
        flat = flat.index_copy(0, self.indices[expert].long(), self.values[expert])
        return flat.view(self.outputs, self.inputs)

    def apply_one(self, x_TI: Tensor, expert: int) -> Tensor:
        kind, dtype = x_TI.device.type, x_TI.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        values, indices = self.values[expert].to(dtype), self.indices[expert]
        with torch.autocast(kind, enabled=False):
            return _SparseProduct.apply(x_TI.to(dtype), values, indices, self.outputs)


class QuantisedDelta(Delta):
    """delta_i of integers of 8, 4 or 2 bits times a scale, or of signs times a scale."""

    codes: Tensor
    scales: Tensor

    def __init__(
        self, shape: Shape, *, bias: bool, bits: int, group_size: int | None = None
    ) -> None:
        super().__init__(shape, bias=bias)
        deltas, outputs, inputs = shape
        self.bits, self.group_size = bits, group_size or inputs
        width, groups = -(-inputs * bits // 8), -(-inputs // self.group_size)
        self.register_buffer("codes", torch.zeros(deltas, outputs, width, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(deltas, outputs, groups))

    def dense(self, expert: int) -> Tensor:
        levels_OI = unpack(self.codes[expert], self.bits, self.inputs).to(self.scales.dtype)
        levels_OI = 2 * levels_OI - 1 if self.bits == 1 else levels_OI - offset(self.bits)
        scales_OG = self.scales[expert]
        if scales_OG.shape[1] == 1:
            return levels_OI * scales_OG
        return levels_OI * scales_OG.repeat_interleave(self.group_size, 1)[:, : self.inputs]


class _SparseProduct(torch.autograd.Function):
    """x delta^T of one sparse delta, and gradients for x and for the values alone.

    Nothing of the size of the whole matrix is made or kept, forward or backward: products are of
    torch's compressed rows where they are fast, otherwise of a few dense rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, values: Tensor, indices: Tensor, outputs: int) -> Tensor:
        inputs = x_TI.shape[1]
        ctx.save_for_backward(x_TI, values, indices)
        # Measured on a CPU: compressed rows are faster up to one value in eight places.
        ctx.thin = x_TI.device.type == "cpu" and torch.backends.mkl.is_available()
        ctx.thin = ctx.thin and 8 * len(values) <= outputs * inputs
        if ctx.thin:
            product_OT = _csr(values, indices, outputs, inputs) @ _at_least_fp32(x_TI).T
            return product_OT.T.to(values.dtype)
        y_TO = x_TI.new_empty(len(x_TI), outputs)
        for rows, block, _, _ in _blocks(values, indices, outputs, inputs):
            y_TO[:, rows] = x_TI @ block.T
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TI, values, indices = ctx.saved_tensors
        gradients = _thin_gradients if ctx.thin else _block_gradients
        with torch.autocast(x_TI.device.type, enabled=False):
            return (*gradients(grads[0].to(values.dtype), x_TI, values, indices), None, None)


def _thin_gradients(gy_TO: Tensor, x_TI: Tensor, values: Tensor, indices: Tensor) -> Gradients:
    """gy delta, and gy^T x at the places of the values."""
    delta_OI = _csr(values, indices, gy_TO.shape[1], x_TI.shape[1])
    gy_TO, x_TI = _at_least_fp32(gy_TO), _at_least_fp32(x_TI)
    gx_IT = delta_OI.t() @ gy_TO.T
    gvalues = torch.sparse.sampled_addmm(delta_OI, gy_TO.T, x_TI, beta=0.0).values()
    return gx_IT.T.to(values.dtype), gvalues.to(values.dtype)


def _block_gradients(gy_TO: Tensor, x_TI: Tensor, values: Tensor, indices: Tensor) -> Gradients:
    """The same, of a block of rows of gy^T x at a time."""
    gx_TI, gvalues = torch.zeros_like(x_TI), torch.zeros_like(values)
    for rows, block, own, places in _blocks(values, indices, gy_TO.shape[1], x_TI.shape[1]):
        gx_TI += gy_TO[:, rows] @ block
        gvalues[own] = (gy_TO[:, rows].T @ x_TI).flatten()[places]
    return gx_TI, gvalues


def _csr(values: Tensor, indices: Tensor, outputs: int, inputs: int) -> Tensor:
    """A sparse matrix [outputs, inputs] as compressed rows."""
    indices = indices.long()
    edges = torch.arange(0, (outputs + 1) * inputs, inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.searchsorted(indices, edges),
            indices % inputs,
            _at_least_fp32(values),
            size=(outputs, inputs),
            check_invariants=False,
        )


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocks(
    values: Tensor, indices: Tensor, outputs: int, inputs: int
) -> Iterator[tuple[slice, Tensor, slice, Tensor]]:
    """Yield rows of a sparse matrix [outputs, inputs]: which, dense, the slice of ``values`` in
    them, and these values' flat positions in the dense rows."""
    height = max(1, _BLOCK_ENTRIES // inputs)
    indices = indices.long()
    starts = range(0, outputs, height)
    edges = torch.tensor([*(start * inputs for start in starts), outputs * inputs])
    bounds = torch.searchsorted(indices, edges.to(indices.device)).tolist()
    for number, start in enumerate(starts):
        rows = slice(start, min(start + height, outputs))
        own = slice(bounds[number], bounds[number + 1])
        places = indices[own] - start * inputs
        block = values.new_zeros((rows.stop - start) * inputs)
        block[places] = values[own]
        yield rows, block.view(-1, inputs), own, places


def make_delta(deltas: int, outputs: int, inputs: int, *, bias: bool, codec: str, **how) -> Delta:
    """Return D deltas of a matrix [outputs, inputs], stored as ``codec`` with its settings."""
    kinds: dict[str, Any] = {
        "sparse": SparseDelta,
        "quantised": QuantisedDelta,
        "low_rank": LowRankDelta,
    }
    return kinds[codec]((deltas, outputs, inputs), bias=bias, **how)
