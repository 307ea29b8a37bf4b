"""What the comparison of experts found, and the numbers derived from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

from upcycle_core.evaluation.similarity.config import REPRESENTATIONS, Representation
from upcycle_core.evaluation.similarity.measure import PairSimilarity

Measure = Literal["cka", "matched", "best"]
MEASURES: tuple[Measure, ...] = ("cka", "matched", "best")
# Two forward passes that differ in the order of their sums alone agree much better than this.
SAME = 1e-3


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One set of experts.

    Args:
        title: What the page calls it (``aligned experts, before post-training``).
        inputs: ``own``: dense models, each on its own hidden states of the same text; ``shared``:
            experts of a MoE, all on the input of their layer.
        pairs: What was measured, in any order.
    """

    title: str
    inputs: Literal["own", "shared"]
    pairs: Sequence[PairSimilarity]

    def names(self) -> list[str]:
        """The experts, in the order they were given."""
        firsts = dict.fromkeys(pair.first for pair in self.pairs)
        return list(firsts | dict.fromkeys(pair.second for pair in self.pairs))

    def layers(self) -> list[int]:
        """The layers that were measured, ascending."""
        return sorted({pair.layer for pair in self.pairs})

    def of(self, representation: Representation, layer: int | None = None) -> list[PairSimilarity]:
        """The pairs of one representation, of one layer or all."""
        return [
            pair
            for pair in self.pairs
            if pair.representation == representation and layer in (None, pair.layer)
        ]

    def mean(
        self, representation: Representation, measure: Measure, layer: int | None = None
    ) -> float | None:
        """Mean over every two experts, at one layer or all; None where nothing has a value."""
        values = [getattr(pair, measure) for pair in self.of(representation, layer)]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None


Stages = Mapping[str, Stage]
"""{key of its metrics: the stage}, in the order they are shown."""


def representations(stages: Stages) -> list[Representation]:
    """Those that some stage has."""
    return [r for r in REPRESENTATIONS if any(stage.of(r) for stage in stages.values())]


def metrics(stages: Stages) -> dict[str, Any]:
    """Numbers for JSON: {stage: {representation: means over pairs by layer, and overall}}."""
    return {
        key: {"title": stage.title, "inputs": stage.inputs}
        | {r: _stage_metrics(stage, r) for r in REPRESENTATIONS if stage.of(r)}
        for key, stage in stages.items()
    }


def unmoved(stages: Stages, representation: Representation) -> list[tuple[Stage, Stage]]:
    """Every two stages of the same experts and inputs whose CKA is the same everywhere."""
    return [
        (first, second)
        for first, second in combinations(stages.values(), 2)
        if first.inputs == second.inputs and _same_cka(first, second, representation)
    ]


def _stage_metrics(stage: Stage, representation: Representation) -> dict[str, Any]:
    pairs = stage.of(representation)
    found: dict[str, Any] = {
        "layers": stage.layers(),
        # Pairs of dense models may have been measured on their own.
        "rows": min(pair.rows for pair in pairs),
        "features": pairs[0].features,
        "constant": max(max(pair.constant_first, pair.constant_second) for pair in pairs),
    }
    for measure in MEASURES:
        found[measure] = stage.mean(representation, measure)
        found[f"{measure}_by_layer"] = [
            stage.mean(representation, measure, layer) for layer in stage.layers()
        ]
    return found


def _same_cka(first: Stage, second: Stage, representation: Representation) -> bool:
    values, others = (
        {(pair.layer, pair.first, pair.second): pair.cka for pair in stage.of(representation)}
        for stage in (first, second)
    )
    if not values or values.keys() != others.keys():
        return False
    both = [(value, others[place]) for place, value in values.items() if value is not None]
    return all(other is not None and abs(value - other) <= SAME for value, other in both)
