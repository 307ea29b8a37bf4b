"""Pictures of a SIMoE model: where its experts are, what they share, which tasks use them.

Each ``draw_`` function writes a PNG.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from upcycle_core.evaluation.instructions.activations import Activation
from upcycle_core.evaluation.instructions.structure import OUTSIDE, Structure
from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.text.scores import mean_and_deviation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

DOMAINS = (*canvas.ACCENTS, "#0b7285", "#a61e4d", "#5c940d", "#7048e8", "#9c6b00", "#495057")
Merges = Sequence[Sequence[float]]
"""What scipy's ``linkage`` gives: [n - 1] (first, second, distance, size)."""


def draw_structure(structure: Structure, path: Path) -> None:
    """Share of active expert parameters, by layer type and by depth (the paper's Fig. 4)."""
    kinds, depths = structure.by_type, structure.by_depth
    widths = (max(len(kinds), 4), max(len(depths), 4))
    with canvas.new_figure(min(2.4 + 0.48 * sum(widths), 13), 3.7) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=widths)
        average = 100 * mean_and_deviation(structure.total)[0]
        for ax, groups, colour in (
            (left, kinds, canvas.ACCENTS[0]),
            (right, depths, canvas.ACCENTS[2]),
        ):
            _bars(ax, groups, colour)
            ax.axhline(average, color=canvas.FAINT, lw=1.1, ls="--", zorder=1)
            ax.grid(axis="y", color=canvas.GRID)
            ax.tick_params(length=0)
            ax.set_xlim(-0.7, len(groups) - 0.3)
        shares = [*kinds.values(), *depths.values()]
        # Room for the longest error bar.
        left.set_ylim(0, 1.08 * max(100 * sum(mean_and_deviation(own)) for own in shares) or 1.08)
        left.set_ylabel("active expert parameters (%)")
        left.set_title("by layer type", loc="left", fontweight="bold")
        right.set_title("by depth", loc="left", fontweight="bold")
        left.set_xticks(range(len(kinds)), list(kinds), rotation=35, ha="right")
        _depth_ticks(right, list(depths))
        canvas.beside(right, f"all\n{average:.1f}", average)
        canvas.save(figure, path)


def draw_overlap(overlaps: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Heat maps of what every two experts share, one a model (the paper's Fig. 5).

    Args:
        overlaps: {title: [M][M] shares}, panels in this order, on one scale.
    """
    sizes = [len(square) for square in overlaps.values()]
    off = [
        100 * value
        for square in overlaps.values()
        for i, row in enumerate(square)
        for j, value in enumerate(row)
        if i != j
    ]
    top = max([*off, 1.0])
    side = 0.44 * max(sizes) + 0.6
    with canvas.new_figure(max(side * len(sizes) + 1.3, 4.4), side + 0.8) as figure:
        axes = figure.subplots(1, len(sizes), squeeze=False)[0]
        for ax, (title, square) in zip(axes, overlaps.items(), strict=True):
            picture = _overlap_map(ax, title, square, top)
        axes[0].set_ylabel("expert")
        canvas.colour_bar(figure, picture, axes, "overlap (%)")
        canvas.save(figure, path)


def draw_activations(activations: Sequence[Activation], path: Path) -> None:
    """A tree of tasks beside their mean expert coefficients, one a task (the paper's Fig. 2)."""
    tree = linkage_of(activations)
    ordered = [activations[place] for place in leaves(tree, len(activations))]
    domains = list(dict.fromkeys(own.domain for own in sorted(activations, key=lambda a: a.domain)))
    colours = {name: DOMAINS[i % len(DOMAINS)] for i, name in enumerate(domains)}
    experts = len(ordered[0].coefficients)
    width = 0.085 * max(len(own.label) for own in ordered) + 0.36 * experts + 3.6
    with canvas.new_figure(width, 0.25 * len(ordered) + 1.3) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(2.2, 0.36 * experts))
        _tree(left, tree, len(ordered))
        values = [own.coefficients for own in ordered]
        picture = right.imshow(values, cmap="Blues", aspect="auto")
        right.set_yticks(range(len(ordered)), [own.label for own in ordered])
        for label, own in zip(right.get_yticklabels(), ordered, strict=True):
            label.set_color(colours[own.domain])
        right.set_xticks(range(experts), [str(i + 1) for i in range(experts)])
        right.set_xlabel("expert")
        for ax in (left, right):
            canvas.bare(ax)
        canvas.colour_bar(figure, picture, [right], "mean coefficient α", pad=0.03)
        canvas.save(figure, path)


def linkage_of(activations: Sequence[Activation]) -> list[list[float]]:
    """Merges of tasks, nearest first: Euclidean distance of coefficients, average linkage."""
    if len(activations) < 2:
        return []
    from scipy.cluster.hierarchy import linkage

    points = [own.coefficients for own in activations]
    return linkage(points, "average", optimal_ordering=True).tolist()


def leaves(tree: Merges, count: int) -> list[int]:
    """The tasks as they stand below each other, so that no branches cross."""
    from scipy.cluster.hierarchy import leaves_list

    return leaves_list(np.array(tree)).tolist() if tree else list(range(count))


def _tree(ax: "Axes", tree: Merges, count: int) -> None:
    """Branches that end at heights 0 to count - 1, the root on the left."""
    heights = dict.fromkeys(range(count), 0.0)
    places = {leaf: float(line) for line, leaf in enumerate(leaves(tree, count))}
    for step, (first, second, distance, _) in enumerate(tree):
        i, j = int(first), int(second)
        xs = [heights[i], distance, distance, heights[j]]
        ax.plot(xs, [places[i], places[i], places[j], places[j]], color=canvas.INK, lw=1.1)
        heights[count + step] = distance
        places[count + step] = (places[i] + places[j]) / 2
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_xlim(max([*heights.values(), 1e-9]) * 1.04, 0)
    ax.set_yticks([])
    ax.set_xlabel("distance")


def _bars(ax: "Axes", groups: Mapping[str, Sequence[float]], colour: str) -> None:
    for place, (name, shares) in enumerate(groups.items()):
        mean, deviation = (100 * value for value in mean_and_deviation(shares))
        ax.bar(place, mean, color=canvas.NEUTRAL if name == OUTSIDE else colour, width=0.68)
        low, high = min(deviation, mean), min(deviation, 100 - mean)  # a share stays one
        ax.errorbar(place, mean, yerr=[[low], [high]], color=canvas.INK, capsize=3, lw=1.1)


def _depth_ticks(ax: "Axes", depths: list[str]) -> None:
    step = max(1, -(-len(depths) // 16))
    shown = [i for i, name in enumerate(depths) if i % step == 0 or name == OUTSIDE]
    ax.set_xticks(shown, [depths[i] for i in shown])
    ax.set_xlabel("layer")


def _overlap_map(
    ax: "Axes", title: str, square: Sequence[Sequence[float]], top: float
) -> "AxesImage":
    values = [[100 * value for value in row] for row in square]
    hidden = [[math.nan if x == y else v for x, v in enumerate(r)] for y, r in enumerate(values)]
    # An expert beside itself says nothing: grey.
    picture = canvas.heat_map(ax, hidden, text=lambda value: f"{value:.0f}", high=top)
    names = [str(i + 1) for i in range(len(square))]
    ax.set_xticks(range(len(names)), names)
    ax.set_yticks(range(len(names)), names)
    pairs = [value for row in hidden for value in row if not math.isnan(value)]
    ax.set_title(title, loc="left", fontweight="bold")
    ax.set_title(f"mean {math.fsum(pairs) / len(pairs):.1f} %", loc="right", color=canvas.FAINT)
    ax.set_xlabel("expert")
    return picture
