"""What is wrong with deltas of matrices whose sizes are known."""

from collections.abc import Iterator, Mapping

from upcycle_core.errors import Fault


def rank_faults(ranks: Mapping[str, int], hidden: int, intermediate: int) -> Iterator[Fault]:
    """Ranks, each by its field, above what matrices of FFNs have.

    Args:
        ranks: Those that deltas are to have.
        hidden: The model's hidden size.
        intermediate: Its FFNs' inner size.
    """
    largest = min(hidden, intermediate)
    for field, rank in ranks.items():
        if rank > largest:
            remedy = f"above the matrices, {hidden} by {intermediate}; use at most {largest}"
            yield Fault(field, rank, remedy)
