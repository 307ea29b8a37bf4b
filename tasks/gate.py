"""The promotion gate: whether a challenger becomes champion, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

from infra.recipe import GateConfig
from upcycle_core.evaluation.scores import normalised, normalised_average, worst_domain


@dataclass(frozen=True)
class Decision:
    """What the gate decided.

    Args:
        promoted: Whether the challenger becomes champion.
        reason: Why, with both figures.
        challenger: The challenger's score; higher is better.
        champion: The champion's; None if there is none.
    """

    promoted: bool
    reason: str
    challenger: float
    champion: float | None


def decide(
    gate: GateConfig,
    *,
    challenger: Mapping[str, float],
    champion: Mapping[str, float] | None,
    experts: Mapping[str, float],
) -> Decision:
    """Compare perplexities that were measured on the same text in the same run.

    Args:
        gate: The metric and the margin.
        challenger: Perplexity by domain.
        champion: The same of the current champion; None if there is none.
        experts: Perplexity of each domain's dense expert, which normalises both.
    """
    mine = gate_score(gate, challenger, experts)
    if champion is None:
        return Decision(True, f"{gate.metric} {mine:.2f}; there was no champion", mine, None)
    theirs = gate_score(gate, champion, experts)
    promoted = mine > theirs + gate.margin
    reason = (
        f"{gate.metric} {mine:.2f} of the challenger "
        f"{'beats' if promoted else 'does not beat'} {theirs:.2f} of the champion"
        + (f" by more than {gate.margin:g}" if gate.margin else "")
    )
    return Decision(promoted, reason, mine, theirs)


def gate_score(
    gate: GateConfig, perplexities: Mapping[str, float], experts: Mapping[str, float]
) -> float:
    """The figure that ``gate`` compares, in percent of the dense experts."""
    if gate.metric == "normalised_average":
        return normalised_average(perplexities, experts)
    return worst_domain(normalised(perplexities, experts))[1]
