"""The promotion gate: whether a challenger becomes champion, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

from infra.recipe.schema import GateConfig
from upcycle_core.evaluation.tasks import results
from upcycle_core.evaluation.tasks.results import TaskEvaluation
from upcycle_core.evaluation.text.scores import normalised, normalised_average, worst_domain

PERPLEXITY = "perplexity."
DIGITS, MORE_DIGITS = 2, 6
"""Decimals of figures that are shown; more where two would print the same."""
Figures = Mapping[str, float | None]
"""{metric: points, higher is better}; None where it is undefined."""


@dataclass(frozen=True)
class Decision:
    """What the gate decided.

    Args:
        promoted: Whether the challenger becomes champion.
        outcome: That and the figures that decided, in a few words (``refused: 89.89 < 90.00``).
        reason: Why, with all figures.
        challenger: The challenger's figure; higher is better, None if undefined.
        champion: The champion's; None if there is none.
    """

    promoted: bool
    outcome: str
    reason: str
    challenger: float | None
    champion: float | None


def decide(
    gate: GateConfig,
    *,
    challenger: Figures,
    champion: Figures | None,
    former: str | None = None,
) -> Decision:
    """Compare figures that were measured on the same text and tasks in the same run.

    The champion is replaced if the gate's metric is better by more than its margin and no other
    metric that the gate names is worse by more than its tolerance. What is undefined keeps it.

    Args:
        gate: The metrics, the margin and the tolerances.
        challenger: Every metric of the gate.
        champion: The same of the current champion; None if there is none.
        former: The number of the version that was champion, where somebody deleted it or took its
            alias away; None where there never was one.
    """
    mine = challenger[gate.metric]
    if champion is None and former is not None:
        reason = f"{gate.metric} {_shown(mine)}; version {former} was champion and none is now, so "
        reason += "that nothing can be judged beside it: set the alias champion in MLflow "
        reason += "(make up), to this version or to another"
        return Decision(False, "refused: no champion any more", reason, mine, None)
    if champion is None:
        reason = f"{gate.metric} {_shown(mine)}; there was no champion"
        done = "refused" if mine is None else "promoted"  # nothing could beat what is undefined
        return Decision(mine is not None, f"{done}: {_shown(mine)}, the first", reason, mine, None)
    theirs = champion[gate.metric]
    promoted = mine is not None and theirs is not None and mine > theirs + gate.margin
    decisive = _compared(mine, theirs, gate.margin)
    reason = (
        f"{gate.metric} {_shown(mine)} of the challenger "
        f"{'beats' if promoted else 'does not beat'} {_shown(theirs)} of the champion"
        + (f" by more than {gate.margin:g}" if gate.margin else "")
    )
    for metric, points in gate.tolerances.items():
        new, old = challenger[metric], champion[metric]
        kept = new is not None and old is not None and old - new <= points
        if promoted and not kept:
            promoted, decisive = False, f"{metric} {_compared(new, old, -points)}"
        reason += (
            f"; {metric} {_shown(new)} against {_shown(old)} "
            f"{'stays within' if kept else 'loses more than'} the tolerance of {points:g}"
        )
    outcome = f"{'promoted' if promoted else 'refused'}: {decisive}"
    return Decision(promoted, outcome, reason, mine, theirs)


def without(withdrawn: Mapping[str, int], decision: Decision) -> Decision:
    """What becomes of a model with experts that a person took back: it is no champion by itself.

    Args:
        withdrawn: {domain: the version that was rolled back with its expert}.
        decision: What the gate said, which had let that version through as well.
    """
    if not withdrawn or not decision.promoted:
        return decision
    held = [f"{domain}'s expert of version {number}" for domain, number in withdrawn.items()]
    why = f"it holds {', '.join(held)}, which was rolled back, on the same text"
    remedy = "correct that text; or, if the expert is good, set the alias in MLflow (make up)"
    outcome = "refused: an expert was rolled back"
    reason = f"{decision.reason}; {why}: {remedy}"
    return replace(decision, promoted=False, outcome=outcome, reason=reason)


def figures(
    gate: GateConfig,
    row: str,
    *,
    perplexities: Mapping[str, float],
    experts: Mapping[str, float],
    tasks: TaskEvaluation | None,
) -> Figures:
    """Every figure that ``gate`` looks at, of one model.

    Args:
        gate: Names the metrics.
        row: The model's row in ``tasks``.
        perplexities: Its perplexity by domain.
        experts: Perplexity of each domain's dense expert, which normalises them.
        tasks: All models' scores on tasks; None if the recipe has no tasks.
    """
    found: dict[str, float | None] = {}
    for metric in gate.metrics:
        if metric == "normalised_average":
            found[metric] = normalised_average(perplexities, experts)
        elif metric == "normalised_worst":
            found[metric] = worst_domain(normalised(perplexities, experts))[1]
        elif metric.startswith(PERPLEXITY):
            found[metric] = -perplexities[metric.removeprefix(PERPLEXITY)]
        else:
            found[metric] = _task_figure(metric, row, tasks)
    return {
        metric: None if figure is None or not isfinite(figure) else figure
        for metric, figure in found.items()
    }


def _task_figure(metric: str, row: str, tasks: TaskEvaluation | None) -> float | None:
    assert tasks is not None  # the recipe's checks let no other gate through
    if metric == "task_average":
        return results.metrics(tasks)["normalised_average"][row]
    task = metric.removeprefix("task.")
    score = tasks.scores[row][task]
    if not score.higher_is_better:
        return -score.mean
    return 100 * score.mean if results.is_share(tasks, task) else score.mean


def _compared(mine: float | None, theirs: float | None, margin: float) -> str:
    """``89.89 < 90.00 + 0.1``: a figure, and what it had to be better than."""
    sign, digits = "?", DIGITS
    if mine is not None and theirs is not None:
        while mine != theirs and digits < MORE_DIGITS and round(mine - theirs, digits) == 0:
            digits += 1
        goal = theirs + margin
        sign = ">" if mine > goal else "<" if mine < goal else "="
    change = f" {'+' if margin > 0 else '-'} {abs(margin):g}" if margin else ""
    return f"{_shown(mine, digits)} {sign} {_shown(theirs, digits)}{change}"


def _shown(figure: float | None, digits: int = DIGITS) -> str:
    return "undefined" if figure is None else f"{figure:.{digits}f}"
