"""One model's score on one task."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from upcycle_core.plain import Plain


@dataclass(frozen=True, kw_only=True)
class TaskScore(Plain):
    """One model's score on one task, in the metric's own unit (accuracies from 0 to 1).

    Args:
        metric: What was measured.
        higher_is_better: Which way the metric points.
        values: One score a seed.
        items: Items that were scored with each seed.
        categories: {category: mean score over its items}, where the items have categories.
        truncated: Items whose prompt was cut to fit the model.
    """

    metric: str
    higher_is_better: bool
    values: tuple[float, ...]
    items: int
    categories: Mapping[str, float] = field(default_factory=dict)
    truncated: int = 0

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return math.fsum(self.values) / len(self.values)
