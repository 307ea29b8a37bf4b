"""Ways of joining strangers, side by side: as they were joined, and after training.

Perplexities of several domains come together as their geometric mean: exp of the mean loss.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle_core.evaluation import scores
from upcycle_core.evaluation.canvas import ACCENTS, FAINT, INK, NEUTRAL, new_figure, save
from upcycle_core.evaluation.table import align

Perplexities = Mapping[str, float]
"""{domain: perplexity}, texts from outside among them."""
NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Joined:
    """One row: a model as it was joined, and what training made of it.

    Args:
        title: What people call it.
        before: As it was joined, or as it is, for a model that is not trained here.
        after: After training; None without.
        own_expert: As it was joined, each domain's tokens all sent to that domain's expert: what
            joining did to the experts, whatever the router. None where that cannot be said.
        parameters: Of the model, and those that one token passes through.
        tokens: Tokens of the training.
    """

    title: str
    before: Perplexities
    after: Perplexities | None = None
    own_expert: Perplexities | None = None
    parameters: tuple[int, int]
    tokens: int = 0


def ablation_metrics(
    experts: Perplexities, rows: Mapping[str, Joined], *, outside: Perplexities
) -> dict[str, dict[str, Any]]:
    """Everything about each row, as plain values.

    Args:
        experts: {domain: perplexity of its own dense expert}, what rows are normalised by.
        rows: {name: row}, in the order they are shown.
        outside: {text from outside: perplexity of the dense anchor}, what is normalised by there.

    Raises:
        InputError: A domain or a finite perplexity is missing.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        found[name] = {
            "title": row.title,
            "parameters": row.parameters[0],
            "active_parameters": row.parameters[1],
            "tokens": row.tokens,
            "own_expert": _state(row.own_expert, experts, {}),
            "before": _state(row.before, experts, outside),
            "after": _state(row.after, experts, outside),
        }
    return found


def _state(
    found: Perplexities | None, experts: Perplexities, outside: Perplexities
) -> dict[str, Any] | None:
    if found is None:
        return None
    domains = {name: found[name] for name in experts}
    texts = {name: found[name] for name in outside}
    return {
        "perplexity": {**domains, **texts},
        "mean_perplexity": geometric_mean(list(domains.values())),
        "normalised_average": scores.normalised_average(domains, experts),
        "outside": scores.normalised(texts, outside) if outside else {},
    }


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def ablation_lines(metrics: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table as cells, its header first."""
    outside = list(next(iter(metrics.values()))["before"]["outside"])
    head = ["Method", "Own expert", "Joined", "Trained", "Joined %", "Trained %"]
    for text in outside:
        head += [f"{text}, joined", f"{text}, trained"]
    lines = [head]
    for row in metrics.values():
        states = [row["own_expert"], row["before"], row["after"]]
        cells = [_cell(state, "mean_perplexity", ".1f") for state in states]
        cells += [_cell(state, "normalised_average", ".1f") for state in states[1:]]
        for text in outside:
            cells += [
                NOTHING if state is None else f"{state['perplexity'][text]:.1f}"
                for state in states[1:]
            ]
        lines.append([row["title"], *cells])
    return lines


def _cell(state: Mapping[str, Any] | None, key: str, form: str) -> str:
    return NOTHING if state is None else format(state[key], form)


def format_ablation(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """The table for a terminal."""
    return align(ablation_lines(metrics))


def markdown_ablation(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in Markdown."""
    head, *body = ablation_lines(metrics)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LEGEND = """\
Own expert, Joined, Trained: perplexity on held-out text, geometric mean over the domains. Own
expert: every domain's tokens through its own expert, no training; Joined: routed, no training;
Trained: after post-training. %: normalised average, in percent of each domain's own dense model,
higher is better. Dense models are shown as they are, in the column Joined."""


def draw_ablation(
    metrics: Mapping[str, Mapping[str, Any]], path: Path, *, highlight: Sequence[str]
) -> None:
    """Two panels, a line of points a row: perplexity as joined and trained, and the score.

    Args:
        metrics: What ``ablation_metrics`` gave.
        path: The PNG to write.
        highlight: Rows whose names are coloured.
    """
    names = list(metrics)[::-1]
    with new_figure(10.2, 0.3 * len(names) + 1.5) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for place, name in enumerate(names):
            row = metrics[name]
            for state, colour, marker in (
                ("own_expert", NEUTRAL, "D"),
                ("before", ACCENTS[1], "o"),
                ("after", ACCENTS[0], "o"),
            ):
                if row[state] is None:
                    continue
                left.plot(row[state]["mean_perplexity"], place, marker, color=colour, ms=5)
                if state != "own_expert":
                    right.plot(row[state]["normalised_average"], place, marker, color=colour, ms=5)
        left.set_yticks(range(len(names)), [metrics[name]["title"] for name in names])
        for label, name in zip(left.get_yticklabels(), names, strict=True):
            label.set_color(ACCENTS[0] if name in highlight else INK)
        left.set_xscale("log")
        left.set_xlabel("perplexity (geometric mean over domains, log scale)")
        right.set_xlabel("normalised average (%)")
        for ax in (left, right):
            ax.grid(color=FAINT, alpha=0.18)
            ax.tick_params("y", length=0)
        handles = [
            left.plot([], [], marker, color=colour, ms=5)[0]
            for marker, colour in (("D", NEUTRAL), ("o", ACCENTS[1]), ("o", ACCENTS[0]))
        ]
        words = ["own expert, as joined", "routed, as joined", "routed, trained"]
        figure.legend(handles, words, loc="outside upper center", ncols=3, frameon=False)
        save(figure, path)
