"""Streaming moments of feature vectors: sum of x x^T, sum of x, and how many.

Shapes: T rows (tokens), H features, C cells kept apart (folds, position buckets).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from upcycle_core.checkpoints.tensor_file import save_atomically
from upcycle_core.precision import matrix_units

NARROW, BLOCK, WIDE = 96, 192, 1024
"""Rows of a product that are computed at once: the fewer, the more is left out of what lies above
its diagonal. Of more than ``WIDE`` features, on a GPU and by matrix units many cost less."""


def triangle_size(size: int) -> int:
    """Entries of the lower triangle, diagonal included, of a ``size`` x ``size`` matrix."""
    return size * (size + 1) // 2


def unpack_triangle(triangle: Tensor, size: int) -> Tensor:
    """The symmetric [``size``, ``size``] matrix whose lower triangle, row by row, this is."""
    lower = torch.zeros(size * size, dtype=triangle.dtype, device=triangle.device)
    lower[_lower(size, triangle.device)] = triangle
    lower = lower.view(size, size)
    return lower + lower.tril(-1).T


@lru_cache(maxsize=4)
def _lower(size: int, device: torch.device) -> Tensor:
    """Where the triangle's entries lie in the square; as large as a triangle, and shared."""
    row, column = torch.tril_indices(size, size, device=device)
    return row * size + column


@lru_cache(maxsize=128)
def _lower_block(start: int, end: int, device: torch.device) -> Tensor:
    """Where rows ``start`` to ``end`` of the triangle lie in a block [end - start, end]."""
    row, column = torch.tril_indices(end - start, end, offset=start, device=device)
    return row * end + column


def _product(x_TH: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Features and what multiplies them, exactly as ``add_gram`` says."""
    if x_TH.dtype != torch.bfloat16:
        return x_TH, torch.mm
    if x_TH.is_cuda:
        return x_TH, partial(torch.mm, out_dtype=torch.float32)
    return x_TH.float(), _exact


def _exact(a: Tensor, b: Tensor) -> Tensor:
    with bf16_units():
        return a @ b


def _lower_blocks(
    wide_TH: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[int, int, Tensor]]:
    """``start``, ``end`` and (x^T x)[start:end, :end], which leaves out most of its upper half."""
    size = wide_TH.shape[1]
    by_units = wide_TH.is_cuda or (product is _exact and matrix_units())
    rows = BLOCK if size > WIDE or by_units else NARROW
    for start in range(0, size, rows):
        end = min(start + rows, size)
        yield start, end, product(wide_TH[:, start:end].T, wide_TH[:, :end])


def add_gram(gram_HH: Tensor, x_TH: Tensor) -> None:
    """Add x^T x of one batch, in the features' own precision (DUME Eq. 5), below the diagonal.

    Products of bf16 numbers are exact in fp32, so bf16 features lose nothing to their product's
    arithmetic as long as it is added up in fp32.

    Args:
        gram_HH: fp64, added to in place. What lies above the diagonal is for ``mirror`` to fill.
        x_TH: fp32, fp64 or bf16 features.
    """
    for start, end, block_RC in _lower_blocks(*_product(x_TH)):
        gram_HH[start:end, :end] += block_RC


@torch.inference_mode()
def mirror(gram_HH: Tensor) -> None:
    """Fill what ``add_gram`` has left above the diagonal, in place."""
    for start in range(0, len(gram_HH), NARROW):
        end = start + NARROW
        gram_HH[:start, start:end] = gram_HH[start:end, :start].T


def _sum_type(x_TH: Tensor) -> torch.dtype:
    return torch.float32 if x_TH.dtype == torch.bfloat16 else x_TH.dtype


@contextmanager
def bf16_units() -> Iterator[None]:
    """Let oneDNN multiply fp32 matrices that hold bf16 values, on a CPU's bf16 units if it has any.

    The units round their operands to bf16 first, which changes nothing for values that are bf16
    already, and add up in fp32: the same numbers several times faster. Where oneDNN prefers its own
    fp32 kernel, that is still twice as fast as the default one on some CPUs.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # put there at import
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class Accumulator:
    """Named sums of features, which files hold and which can be added up.

    Attributes:
        parts: Names of the sums, as attributes and in files.
    """

    parts: ClassVar[tuple[str, ...]]
    size: int
    sums: Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> Self:
        """The accumulator that ``tensors`` was taken from, over the same memory."""
        found = cls.__new__(cls)
        for part in cls.parts:
            setattr(found, part, tensors[prefix + part])
        found.size = found.sums.shape[1]
        return found

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The accumulated numbers by name, on the CPU, as a file stores them."""
        return {prefix + part: getattr(self, part).cpu() for part in self.parts}

    def merge(self, other: Self) -> None:
        """Add what ``other`` has counted."""
        for part in self.parts:
            getattr(self, part).add_(getattr(other, part))


def save_sums(
    path: Path, sums: Mapping[str, Accumulator], *, kind: str, header: Mapping[str, object]
) -> None:
    """Write accumulators by name, whole or not at all; ``kind`` and ``header`` name the file."""
    tensors: dict[str, Tensor] = {}
    for name, accumulated in sums.items():
        tensors |= accumulated.tensors(f"{name}.")
    save_atomically(path, tensors, kind=kind, header=header)


class Moments(Accumulator):
    """The accumulator: within a batch the features' own precision, across batches fp64.

    Attributes:
        products: [C, H(H+1)/2] fp64, the lower triangles of sum x x^T.
        sums: [C, H] fp64, sum x.
        counts: [C] int64, rows counted; on the CPU, which knows them without asking the device.
    """

    parts = ("products", "sums", "counts")

    def __init__(self, size: int, *, cells: int = 1, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.products = torch.zeros(cells, triangle_size(size), dtype=torch.float64, device=device)
        self.sums = torch.zeros(cells, size, dtype=torch.float64, device=device)
        self.counts = torch.zeros(cells, dtype=torch.int64)

    @staticmethod
    def layout(size: int, *, cells: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{part: shape and type} of what a file holds of it."""
        return {
            "products": ((cells, triangle_size(size)), torch.float64),
            "sums": ((cells, size), torch.float64),
            "counts": ((cells,), torch.int64),
        }

    def update(self, x_TH: Tensor, *, rows: Tensor | None = None, cell: int = 0) -> None:
        """Count one batch.

        Args:
            x_TH: Features [..., H]; leading dimensions are flattened.
            rows: Which of the flattened rows count (int64); all of them by default. Left-out rows
                (padding) are never read, so they may hold anything.
            cell: Where the batch is counted.
        """
        x_TH = x_TH.reshape(-1, self.size)
        if rows is not None:
            x_TH = x_TH.index_select(0, rows)
        wide_TH, product = _product(x_TH)
        for start, end, block_RC in _lower_blocks(wide_TH, product):
            place = slice(triangle_size(start), triangle_size(end))
            entries = _lower_block(start, end, self.products.device)
            self.products[cell, place] += block_RC.take(entries)
        self.sums[cell] += wide_TH.sum(0, dtype=_sum_type(x_TH))
        self.counts[cell] += len(x_TH)

    def count(self) -> int:
        """Rows counted in all cells."""
        return int(self.counts.sum())

    def sum(self) -> Tensor:
        """sum x over all cells, added in their order: [H] fp64."""
        return _added(self.sums)

    def gram(self) -> Tensor:
        """sum x x^T over all cells, added in their order: [H, H] fp64."""
        return unpack_triangle(_added(self.products), self.size)


def _added(cells: Tensor) -> Tensor:
    total = torch.zeros_like(cells[0])
    for cell in cells:
        total += cell
    return total
