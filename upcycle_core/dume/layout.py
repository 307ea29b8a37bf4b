"""What a statistics file keeps apart: layers, folds of documents, buckets of positions."""

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle_core.errors import Fault, InputError


@dataclass(frozen=True)
class Layout:
    """What is kept apart in a statistics file."""

    hidden_size: int
    """H."""
    layers: tuple[int, ...]
    """Layers whose router inputs were counted."""
    folds: int
    """Parts by document, for cross-validation."""
    position_buckets: tuple[int, ...] = ()
    """Ascending token windows: (2, 16) keeps positions 0-1, 2-15 and the rest apart."""

    @property
    def cell_count(self) -> int:
        """Cells of each layer's moments: folds times position buckets."""
        return self.folds * (len(self.position_buckets) + 1)

    def cell(self, fold: int, bucket: int) -> int:
        """Where tokens of ``fold`` at positions of ``bucket`` are counted."""
        return fold * (len(self.position_buckets) + 1) + bucket

    def cells(self, *, folds: Sequence[int] | None = None, window: int | None = None) -> list[int]:
        """The cells that make up ``folds`` and the first ``window`` positions (all by default).

        Raises:
            InputError: ``window`` is not one of the position buckets.
        """
        if window is not None and window not in self.position_buckets:
            remedy = f"these statistics keep apart {list(self.position_buckets)}; add it there"
            raise InputError(Fault("statistics.position_buckets", window, remedy))
        buckets = len(self.position_buckets) + 1
        if window is not None:
            buckets = self.position_buckets.index(window) + 1
        chosen = range(self.folds) if folds is None else folds
        return [self.cell(fold, bucket) for fold in chosen for bucket in range(buckets)]
