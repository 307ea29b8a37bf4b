"""Data-parallel workers: who they are and what they say to each other.

A worker is a process of an initialised ``torch.distributed``; without one there is a single worker.
"""

from collections.abc import Sequence

from torch import Tensor, distributed


def count() -> int:
    """Workers that share the batches of a step, W."""
    return distributed.get_world_size() if _several() else 1


def rank() -> int:
    """Number of this worker, from 0. Worker 0 writes files and reports."""
    return distributed.get_rank() if _several() else 0


def wait() -> None:
    """Return once every worker has come here."""
    if _several():
        distributed.barrier()


def total(values: Tensor) -> Tensor:
    """Sum of ``values`` over all workers, the same on each; gradients do not flow through it."""
    if _several():
        values = values.detach().clone()
        distributed.all_reduce(values)
    return values


def whole(values: Tensor) -> Tensor:
    """``values``, gathered where workers hold parts of them; then all must ask."""
    from torch.distributed.tensor import DTensor  # slow to import

    return values.full_tensor() if isinstance(values, DTensor) else values


def divided_dimension(sizes: Sequence[int], count: int) -> int:
    """The dimension by which ``count`` workers divide a tensor: the first, or the last.

    Five experts [5, 2I, H] that eight workers divide by the first are on five of them, and on each
    of the eight is room for one.
    """
    return 0 if sizes[0] % count == 0 or sizes[-1] % count else len(sizes) - 1


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized()
