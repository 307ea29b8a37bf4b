"""Pictures of how alike experts are; each ``draw_`` function writes a PNG."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.similarity.config import Representation
from upcycle_core.evaluation.similarity.results import Measure, Stage, Stages, representations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES: dict[Representation, str] = {
    "neurons": "neurons: act(gate) · up",
    "outputs": "outputs: what the FFN adds to the residual stream",
}
LAYERS_SHOWN = 6


def draw_layers(compared: Stages, path: Path) -> None:
    """Means over every two experts, by layer: CKA above, matched correlation below.

    A column per representation, a line per stage.
    """
    columns, stages = representations(compared), list(compared.values())
    with canvas.new_figure(4.3 * len(columns) + 0.4, 5.6 + 0.22 * len(stages)) as figure:
        grid = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
        for column, representation in enumerate(columns):
            _lines(grid[0][column], stages, representation, "cka")
            _lines(grid[1][column], stages, representation, "matched")
            _lines(grid[1][column], stages, representation, "best")
            grid[0][column].set_title(_TITLES[representation])
            grid[1][column].set_xlabel("layer")
        grid[0][0].set_ylabel("linear CKA")
        grid[1][0].set_ylabel("correlation of matched features")
        for ax in grid.flat:
            ax.grid(axis="y", color=canvas.GRID)
        for ax in grid[0]:
            ax.set_ylim(-0.03, 1.03)
        layers = sorted({layer for stage in stages for layer in stage.layers()})
        every = math.ceil(len(layers) / 10)
        grid[0][0].set_xticks(layers[::every])
        # Only the lines of CKA, one a stage, go into the legend; dashes are told once.
        handles, labels = grid[0][0].get_legend_handles_labels()
        dashed = grid[1][0].plot([], [], ls=(0, (3, 2)), color=canvas.FAINT)[0]
        figure.legend(
            [*handles, dashed],
            [*labels, "what the best one-to-one matching of features would reach"],
            loc="outside lower left",
            frameon=False,
            ncols=2,
        )
        figure.suptitle("How alike are two experts? Mean over all pairs", x=0.01, ha="left")
        canvas.save(figure, path)


def draw_pairs(compared: Stages, representation: Representation, path: Path) -> None:
    """Heat maps of every two experts: a row per stage, a column per layer.

    Of each map the upper half is CKA, the lower half the correlation of matched features. At most
    ``LAYERS_SHOWN`` layers are shown.
    """
    stages = [stage for stage in compared.values() if stage.of(representation)]
    layers = _spread(sorted({layer for stage in stages for layer in stage.layers()}))
    most = max(len(stage.names()) for stage in stages)
    longest = max(len(name) for stage in stages for name in stage.names())
    side, names_width = 0.5 * most + 0.1, 0.085 * longest
    size = (side * len(layers) + names_width + 0.2, (side + 0.42) * len(stages) + names_width + 0.5)
    with canvas.new_figure(max(size[0], 6.8), size[1]) as figure:
        grid = figure.subplots(len(stages), len(layers), squeeze=False)
        # Room for the stages' titles, which are wider than the map they stand above.
        figure.set_layout_engine("constrained", h_pad=0.16, w_pad=0.03)
        for axes, stage in zip(grid, stages, strict=True):
            for ax, layer in zip(axes, layers, strict=True):
                _map(ax, stage, representation, layer)
            axes[0].set_yticks(range(len(stage.names())), stage.names())
            title = axes[0].annotate(
                stage.title,
                (0, 1),
                (0, 5),
                xycoords="axes fraction",
                textcoords="offset points",
                fontweight="bold",
            )
            title.set_in_layout(False)
        for ax, layer in zip(grid[-1], layers, strict=True):
            canvas.name_columns(ax, stages[-1].names())
            ax.set_xlabel(f"layer {layer}")
        figure.suptitle(
            f"{_TITLES[representation]}\nabove the diagonal: linear CKA; below: correlation of "
            "matched features",
            x=0.01,
            ha="left",
        )
        canvas.save(figure, path)


def _lines(
    ax: "Axes", stages: Sequence[Stage], representation: Representation, measure: Measure
) -> None:
    dash = (0, (3, 2)) if measure == "best" else "-"
    colours = cycle((canvas.NEUTRAL, *canvas.ACCENTS))
    for place, (stage, colour) in enumerate(zip(stages, colours, strict=False)):
        if not stage.of(representation):
            continue
        means = [stage.mean(representation, measure, layer) for layer in stage.layers()]
        # Stages that coincide stay visible: each is thinner than the ones below it.
        weight = 1.2 + 2.6 * (1 - (place + 1) / len(stages))
        ax.plot(
            stage.layers(),
            [math.nan if mean is None else mean for mean in means],
            ls=dash,
            marker="" if measure == "best" else "osD^"[place // 5 % 4],
            markevery=math.ceil(len(means) / 10),
            lw=1.1 if measure == "best" else weight,
            ms=2.5 + weight,
            color=colour,
            label=stage.title,
        )


def _map(ax: "Axes", stage: Stage, representation: Representation, layer: int) -> None:
    names = stage.names()
    values = [[math.nan] * len(names) for _ in names]
    for pair in stage.of(representation, layer):
        first, second = sorted((names.index(pair.first), names.index(pair.second)))
        values[first][second] = math.nan if pair.cka is None else pair.cka
        values[second][first] = pair.matched
    canvas.heat_map(ax, values, text=lambda v: f"{v:.2f}".replace("0.", ".").replace("-.00", ".00"))


def _spread(layers: Sequence[int]) -> list[int]:
    """``LAYERS_SHOWN`` of them at most, the first and the last among them."""
    if len(layers) <= LAYERS_SHOWN:
        return list(layers)
    step = (len(layers) - 1) / (LAYERS_SHOWN - 1)
    return [layers[round(place * step)] for place in range(LAYERS_SHOWN)]
