"""Pictures of a training, with the numbers behind them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.report.canvas import FAINT, INK, new_figure, save
from upcycle_core.training.watch import loads

_TICKS = 12
"""Steps that are written under the map at most."""


def write_load(curves: Sequence[Mapping[str, float]], directory: Path) -> None:
    """Write ``load.csv`` and ``load.png`` into ``directory``.

    Args:
        curves: ``TrainingResult.curves`` of a Mixture-of-Experts.
        directory: Made if it is not there. The CSV has a line a step, layer and expert, with the
            share of the layer's assignments that went to the expert.

    Raises:
        InputError: There is no load in ``curves``.
    """
    found = loads(curves)
    if not found:
        remedy = "hold no expert load; give those of a trained Mixture-of-Experts"
        raise InputError(Fault("curves", f"{len(curves)} points", remedy))
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "load.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "layer", "expert", "share"])
        writer.writerows(found)
    _draw(found, directory / "load.png")


def _draw(found: Sequence[tuple[int, int, int, float]], path: Path) -> None:
    """Heat map of expert load: a row a layer and expert, a column a watched step."""
    steps = sorted({step for step, *_ in found})
    rows = sorted({(layer, expert) for _, layer, expert, _ in found})
    share = {(layer, expert, step): value for step, layer, expert, value in found}
    grid = [[share[layer, expert, step] for step in steps] for layer, expert in rows]
    with new_figure(1.9 + max(3.4, min(9.0, 0.22 * len(steps))), 1.1 + 0.21 * len(rows)) as figure:
        ax = figure.subplots()
        image = ax.imshow(
            grid,
            cmap="Blues",
            vmin=0,
            vmax=max(map(max, grid)),
            aspect="auto",
            interpolation="none",
        )
        labels = [f"layer {layer}, expert 0" if e == 0 else f"{e}" for layer, e in rows]
        ax.set_yticks(range(len(rows)), labels)
        for place, (layer, expert) in enumerate(rows):
            if expert == 0 and layer != rows[0][0]:
                ax.axhline(place - 0.5, color=INK, lw=0.8)
        shown = range(0, len(steps), -(-len(steps) // _TICKS))
        ax.set_xticks(shown, [str(steps[place]) for place in shown])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_xlabel("optimizer step")
        bar = figure.colorbar(image, ax=ax, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(color=FAINT)
        experts = len({expert for _, expert in rows})
        ax.set_title(f"Share of each layer's load by expert (even: {1 / experts:.2g})")
        save(figure, path)
