"""Pictures of an evaluation; each ``draw_`` function writes a PNG.

Drawn on figures of their own: no pyplot, no shared state.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path

from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.text import routing
from upcycle_core.evaluation.text.results import Parameter

_AXES: dict[Parameter, str] = {
    "top_k": "experts a token passes through (k)",
    "ridge_lambda": "ridge regularisation (λ)",
    "window": "tokens of each paragraph used for the statistics",
}
SWEEPS: Mapping[Parameter, str] = {
    "window": "Effect of the token window",
    "top_k": "Effect of k",
    "ridge_lambda": "Effect of λ",
}
"""What is said of a sweep, in the order of the paper's Figure 2."""
DEEP = 12
"""Layers of which each has a heat map of its own; of more, all share one."""
WIDE = 60
"""Columns of all heat maps together, of fewer layers; of more, all share one."""
PAGE = 12.0
"""Inches across that a page shows, and a card in numbers that can be read."""
TOLD = 20
"""Domains up to which a heat map's cells say their share."""
REFERENCES = ("oracle", "model_averaging")
"""Rows that stand beside a sweep as lines."""


def draw_routing(counts: Mapping[str, routing.Counts], path: Path) -> None:
    """Where each domain's tokens went: heat maps, one a layer and one of all layers.

    Of more than ``DEEP`` layers, or of many domains, one heat map of all, and beside it a line a
    domain over the layers: the share that went to its own expert.

    Args:
        counts: {domain: [L][D] tokens}, in the order of the experts.
    """
    names = list(counts)
    maps = {"all layers": [routing.mean_shares(layers) for layers in counts.values()]}
    per_domain = [routing.shares(layers) for layers in counts.values()]
    layers = len(per_domain[0])
    if layers > DEEP or len(names) * (1 + layers) > WIDE:
        _draw_deep_routing(names, maps["all layers"], per_domain, path)
        return
    for layer in range(len(per_domain[0])):
        maps[f"layer {layer}"] = [shares[layer] for shares in per_domain]
    side, margin = 0.62 * len(names) + 0.55, 0.13 * max(map(len, names)) + 0.4
    rows = math.ceil(len(maps) / max(1, int((PAGE - margin) / side)))
    columns = math.ceil(len(maps) / rows)
    with canvas.new_figure(side * columns + margin, side * rows + 1.3) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, ax in enumerate(grid.flat):
            if index >= len(maps):
                ax.set_axis_off()
                continue
            label, shares = list(maps.items())[index]
            ax.set_title(label)
            canvas.heat_map(ax, shares, text=lambda share: f"{100 * share:.0f}")
            if index % columns == 0:
                ax.set_yticks(range(len(names)), names)
            if index + columns >= len(maps):  # nothing below
                canvas.name_columns(ax, names)
        figure.suptitle("Share of each domain's tokens (rows) sent to each expert (columns), %")
        canvas.save(figure, path)


def _draw_deep_routing(
    names: Sequence[str],
    overall: Sequence[Sequence[float]],
    per_domain: Sequence[Sequence[Sequence[float]]],
    path: Path,
) -> None:
    tells = len(names) <= TOLD
    side = (0.62 if tells else 0.2) * len(names) + 0.55
    with canvas.new_figure(side + 7.2, max(side + 1.0, 3.6)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(side, 5.4))
        canvas.heat_map(left, overall, text=(lambda s: f"{100 * s:.0f}") if tells else None)
        left.set_title("all layers: % of a domain's tokens (row)\nsent to each expert (column)")
        left.set_yticks(range(len(names)), names)
        canvas.name_columns(left, names)
        styles = product(("-", "--", ":"), canvas.ACCENTS)
        for own, (name, (style, colour)) in enumerate(zip(names, cycle(styles), strict=False)):
            line = [100 * layer[own] for layer in per_domain[own]]
            right.plot(range(len(line)), line, style, color=colour, lw=1.8, label=name)
        chance = 100 / len(names)
        right.axhline(chance, color=canvas.FAINT, lw=1.2, ls="--")
        canvas.beside(right, "chance", chance)
        right.set_ylim(0, 103)
        right.set_xlabel("layer")
        right.set_title("% of a domain's tokens sent to its own expert")
        right.grid(axis="y", color=canvas.GRID)
        right.legend(frameon=False, ncols=min(len(names), 4), loc="lower center")
        canvas.save(figure, path)


def draw_sweep(
    parameter: Parameter,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    references: Mapping[str, float],
    path: Path,
) -> None:
    """Normalised average against one parameter (the paper's Figure 2).

    Args:
        parameter: What varies; decides the axis (lambda and window are logarithmic; 0 stands a
            step before the smallest other value).
        curves: {label: [(value, normalised average)]}, ascending values.
        references: {label: normalised average} drawn as horizontal lines.
    """
    with canvas.new_figure(6.4, 3.9) as figure:
        ax = figure.subplots()
        values = sorted({value for points in curves.values() for value, _ in points})
        places = dict(zip(values, values, strict=True))
        if parameter != "top_k" and any(values):
            base = 2 if parameter == "window" else 10
            ax.set_xscale("log", base=base)
            places[0] = min(filter(None, values)) / base
        for (label, points), colour in zip(curves.items(), cycle(canvas.ACCENTS), strict=False):
            placed = [(places[value], score) for value, score in points]
            ax.plot(*zip(*placed, strict=True), "o-", color=colour, label=label, lw=2, ms=5.5)
        ax.margins(x=0.05, y=0.12)
        for rank, (label, value) in enumerate(sorted(references.items(), key=lambda own: own[1])):
            ax.axhline(value, color=canvas.FAINT, lw=1.2, ls="--")
            # The labels of two close lines lean away from each other.
            lean = ("top", "bottom")[rank] if len(references) == 2 else "center"
            canvas.beside(ax, label, value, lean=lean)
        ax.autoscale_view()
        ax.set_xticks([places[value] for value in values], [f"{value:g}" for value in values])
        ax.set_xticks([], minor=True)
        ax.set_xlabel(_AXES[parameter])
        ax.set_ylabel("normalised average (%)")
        ax.grid(axis="y", color=canvas.GRID)
        if len(curves) > 1:  # within the axes it would lie on a reference
            figure.legend(loc="outside upper center", ncols=len(curves), frameon=False)
        canvas.save(figure, path)


def draw_scores(
    averages: Mapping[str, tuple[float, float | None]], highlight: str | None, path: Path
) -> None:
    """Horizontal bars of the table's normalised averages, in the table's order.

    Args:
        averages: {label: normalised average and its standard deviation, an error bar}.
        highlight: The label whose bar is coloured; None for none.
    """
    labels, means = list(averages), [mean for mean, _ in averages.values()]
    with canvas.new_figure(7.2, 0.34 * len(labels) + 1.1) as figure:
        ax = figure.subplots()
        colours = [canvas.ACCENTS[0] if label == highlight else canvas.NEUTRAL for label in labels]
        ax.barh(labels, means, color=colours, height=0.68)
        for position, (mean, deviation) in enumerate(averages.values()):
            ax.errorbar(mean, position, xerr=deviation, color=canvas.INK, capsize=3)
            ax.annotate(
                f"{mean:.1f}",
                (mean + (deviation or 0.0), position),
                (5, 0),
                textcoords="offset points",
                va="center",
                bbox={"color": "white", "pad": 1},
            )
        ax.axvline(100, color=canvas.FAINT, lw=1, ls=":", zorder=0)
        ax.set_xlim(0, max(100.0, *means) * 1.09)
        ax.invert_yaxis()
        ax.tick_params("y", length=0)
        ax.set_xlabel("normalised average perplexity (%): 100 is each domain's own dense expert")
        canvas.save(figure, path)
