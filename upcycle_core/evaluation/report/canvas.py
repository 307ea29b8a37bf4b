"""What every picture shares: colours, a figure of its own, and bytes that depend on data alone."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

INK, FAINT, GRID = "#1f2430", "#6b7280", "#e5e7eb"
ACCENTS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c")
NEUTRAL = "#a8b3c4"


@contextmanager
def new_figure(width: float, height: float) -> Iterator["Figure"]:
    """A figure of ``width`` x ``height`` inches, drawn without pyplot and its shared state."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The user's own matplotlibrc must not change the bytes of a picture.
    defaults: dict[Any, Any] = dict(matplotlib.rcParamsDefault)
    del defaults["backend"]
    settings = defaults | {
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.titlesize": 9.5,
        "figure.titlesize": 10.5,
        "xtick.color": INK,
        "ytick.color": INK,
        # Names that people gave stand in pictures, and may hold dollar signs.
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def log_axis(ax: "Axes") -> None:
    """A logarithmic x axis, its numbers as text: matplotlib's own are formulas."""
    from matplotlib.ticker import LogFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(LogFormatter())
    ax.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG."""
    # The metadata would name the version of matplotlib: a file depends on its inputs alone.
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.12, metadata={"Software": None})


def heat_map(
    ax: "Axes",
    values: Sequence[Sequence[float]],
    *,
    text: Callable[[float], str] | None,
    low: float = 0.0,
    high: float = 1.0,
) -> "AxesImage":
    """Squares from white at ``low`` to blue at ``high``, with their ``text``; NaN is left grey."""
    picture = ax.imshow(values, cmap="Blues", vmin=low, vmax=high, aspect="equal")
    for y, row in enumerate(values if text else ()):
        for x, value in enumerate(row):
            if text and not math.isnan(value):
                ink = "white" if (value - low) / (high - low) > 0.55 else INK
                ax.text(x, y, text(value), ha="center", va="center", color=ink, fontsize=8.5)
    ax.set_facecolor(GRID)
    ax.set_xticks(range(len(values[0])), [])
    ax.set_yticks(range(len(values)), [])
    bare(ax)
    return picture


def bare(ax: "Axes") -> None:
    """Take frame and tick marks away; labels stay."""
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def name_columns(ax: "Axes", names: Sequence[str]) -> None:
    """Name the columns of a heat map, slanted, so that long names fit."""
    ax.set_xticks(range(len(names)), names)
    ax.tick_params("x", labelrotation=40)
    for label in ax.get_xticklabels():
        label.set(ha="right", rotation_mode="anchor")


def colour_bar(
    figure: "Figure",
    picture: "AxesImage",
    axes: "Sequence[Axes]",
    label: str = "",
    *,
    shrink: float = 0.8,
    pad: float = 0.02,
) -> None:
    """The scale of heat maps beside them: ``shrink`` of their height, ``pad`` of a width away."""
    bar = figure.colorbar(picture, ax=list(axes), shrink=shrink, pad=pad)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.set_label(label)


def beside(ax: "Axes", text: str, height: float, *, lean: str = "center") -> None:
    """A small grey text on the right of the axes, at a height in data units.

    Args:
        ax: Beside what.
        text: What is said.
        height: Where, in data units.
        lean: Which part of the text is at that height: ``center``, ``top``, ``bottom``.
    """
    ax.annotate(
        text,
        (1, height),
        (4, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=FAINT,
        va=lean,
        fontsize=8.5,
    )


def settle(figure: "Figure") -> None:
    """Fix the layout, so that what is drawn from now on may use the places of points."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
