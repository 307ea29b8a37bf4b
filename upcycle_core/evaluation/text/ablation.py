"""Ways of joining strangers, side by side: as they were joined, and after training.

Perplexities of several domains come together as their geometric mean: exp of the mean loss.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.report.canvas import ACCENTS, FAINT, INK, NEUTRAL, new_figure, save
from upcycle_core.evaluation.text import scores
from upcycle_core.evaluation.text.table import align

Perplexities = Mapping[str, float]
"""{domain: perplexity}, texts from outside among them."""
NOTHING = "–"
ROUTED = ("before", "after")


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
    domains = {name: value for name, value in found.items() if name in experts}
    texts = {name: value for name, value in found.items() if name in outside}
    average = scores.normalised_average(domains, experts)
    return {
        "perplexity": {**domains, **texts},
        "mean_perplexity": geometric_mean(list(domains.values())),
        "normalised_average": average,
        "outside": scores.normalised(texts, outside),
    }


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def ablation_lines(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """The table as cells, its header first.

    Args:
        runs: What ``ablation_metrics`` gave, once a seed; several are shown as mean ± sample
            standard deviation.
    """
    outside = list(next(iter(runs[0].values()))["before"]["outside"])
    head = ["Method", "Own expert", "Joined", "Trained", "Joined %", "Trained %"]
    for text in outside:
        head += [f"{text}, joined", f"{text}, trained"]
    lines = [head]
    for name, first in runs[0].items():
        rows = [run[name] for run in runs]
        cells = [_cell(rows, key, "mean_perplexity") for key in ("own_expert", *ROUTED)]
        cells += [_cell(rows, key, "normalised_average") for key in ROUTED]
        for text in outside:
            cells += [_cell(rows, key, "perplexity", text) for key in ROUTED]
        lines.append([first["title"], *cells])
    return lines


def _cell(rows: Sequence[Mapping[str, Any]], state: str, *keys: str) -> str:
    if rows[0][state] is None:
        return NOTHING
    values = []
    for row in rows:
        value = row[state]
        for key in keys:
            value = value[key]
        values.append(value)
    mean, deviation = scores.mean_and_deviation(values)
    return f"{mean:.1f}" if len(rows) == 1 else f"{mean:.1f} ± {deviation:.1f}"


def format_ablation(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """The table for a terminal."""
    return align(ablation_lines(runs))


def markdown_ablation(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """The table in Markdown."""
    head, *body = ablation_lines(runs)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LEGEND = """\
Own expert, Joined, Trained: perplexity on held-out text, geometric mean over the domains. Own
expert: every domain's tokens through its own expert (the anchor's where it has none), no training;
Joined: routed, no training; Trained: after post-training. %: normalised average, in percent of each
domain's own dense model, higher is better. Dense models are shown as they are, under Joined."""


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
