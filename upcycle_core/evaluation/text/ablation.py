"""Ways of joining strangers, side by side: as they were joined, and after training.

Perplexities of several domains come together as their geometric mean: exp of the mean loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.numbers import number
from upcycle_core.evaluation.report.parts import DASH, Figure, Table
from upcycle_core.evaluation.text import scores

Perplexities = Mapping[str, float]
"""{domain: perplexity}, texts from outside among them."""
Metrics = Mapping[str, Mapping[str, Any]]
"""{row: everything about it}: what ``ablation_metrics`` gives."""
ROUTED = ("before", "after")
STATES = {
    "own_expert": ("own expert, as joined", canvas.NEUTRAL, "D"),
    "before": ("routed, as joined", canvas.ACCENTS[1], "o"),
    "after": ("routed, trained", canvas.ACCENTS[0], "o"),
}
"""{state: what people call it, colour and marker of its points}"""


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
    return {
        name: {
            "title": row.title,
            "parameters": row.parameters[0],
            "active_parameters": row.parameters[1],
            "tokens": row.tokens,
            "own_expert": _state(row.own_expert, experts, {}),
            "before": _state(row.before, experts, outside),
            "after": _state(row.after, experts, outside),
        }
        for name, row in rows.items()
    }


def _state(
    found: Perplexities | None, experts: Perplexities, outside: Perplexities
) -> dict[str, Any] | None:
    if found is None:
        return None
    domains = {name: value for name, value in found.items() if name in experts}
    texts = {name: value for name, value in found.items() if name in outside}
    average = scores.normalised_average(domains, experts)  # refuses what has no logarithm
    return {
        "perplexity": {**domains, **texts},
        "mean_perplexity": geometric_mean(domains.values()),
        "normalised_average": average,
        "outside": scores.normalised(texts, outside),
    }


def ablation_table(runs: Sequence[Metrics]) -> Table:
    """One line a row, as ``LEGEND`` says.

    Args:
        runs: What ``ablation_metrics`` gave, once a seed; several are shown as mean ± sample
            standard deviation.
    """
    outside = list(next(iter(runs[0].values()))["before"]["outside"])
    head = ["Method", "Own expert", "Joined", "Trained", "Joined %", "Trained %"]
    columns = [(state, "mean_perplexity") for state in ("own_expert", *ROUTED)]
    columns += [(state, "normalised_average") for state in ROUTED]
    for text in outside:
        head += [f"{text}, joined", f"{text}, trained"]
    rows = []
    for row, first in runs[0].items():
        found = [run[row] for run in runs]
        cells = [_cell([own[state] for own in found], figure) for state, figure in columns]
        for text in outside:
            cells += [_cell([own[state] for own in found], "perplexity", text) for state in ROUTED]
        rows.append([first["title"], *cells])
    several = f" Mean ± deviation over {len(runs)} seeds; the picture is the first's."
    return Table(head, rows, LEGEND + several if len(runs) > 1 else LEGEND)


def _cell(states: Sequence[Mapping[str, Any] | None], figure: str, text: str = "") -> str:
    known = [state[figure] for state in states if state is not None]
    if not known:
        return DASH
    mean, deviation = scores.mean_and_deviation([own[text] if text else own for own in known])
    return number(mean, deviation if len(states) > 1 else None)


LEGEND = (
    "Own expert, Joined, Trained: perplexity on held-out text, geometric mean over the domains. "
    "Own expert: every domain's tokens through its own expert (the anchor's where it has none), no "
    "training; Joined: routed, no training; Trained: after post-training. %: normalised average, "
    "in percent of each domain's own dense model, higher is better. Dense models are shown as they "
    "are, under Joined."
)


def ablation_figure(metrics: Metrics, name: str, *, highlight: Sequence[str]) -> Figure:
    """The picture of one run, under a name; see ``draw_ablation``."""
    draw = partial(draw_ablation, metrics, highlight=highlight)
    return Figure(name, "Perplexity and score of every row, as joined and trained", draw)


def draw_ablation(metrics: Metrics, path: Path, *, highlight: Sequence[str]) -> None:
    """Two panels, a line of points a row: perplexity as joined and trained, and the score.

    Args:
        metrics: What ``ablation_metrics`` gave.
        path: The PNG to write.
        highlight: Rows whose names are coloured.
    """
    names = list(metrics)[::-1]
    with canvas.new_figure(10.2, 0.3 * len(names) + 1.5) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for place, name in enumerate(names):
            row = metrics[name]
            for state, (_, colour, marker) in STATES.items():
                if row[state] is None:
                    continue
                left.plot(row[state]["mean_perplexity"], place, marker, color=colour, ms=5)
                if state != "own_expert":
                    right.plot(row[state]["normalised_average"], place, marker, color=colour, ms=5)
        left.set_yticks(range(len(names)), [metrics[name]["title"] for name in names])
        for label, name in zip(left.get_yticklabels(), names, strict=True):
            label.set_color(canvas.ACCENTS[0] if name in highlight else canvas.INK)
        canvas.log_axis(left)
        left.set_xlabel("perplexity (geometric mean over domains, log scale)")
        right.set_xlabel("normalised average (%)")
        for ax in (left, right):
            ax.grid(color=canvas.FAINT, alpha=0.18)
            ax.tick_params("y", length=0)
        words = [word for word, _, _ in STATES.values()]
        handles = [left.plot([], [], mark, color=c, ms=5)[0] for _, c, mark in STATES.values()]
        figure.legend(handles, words, loc="outside upper center", ncols=3, frameon=False)
        canvas.save(figure, path)
