"""What every picture shares: colours, a figure of its own, and bytes that depend on data alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG."""
    # The metadata would name the version of matplotlib: a file depends on its inputs alone.
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.12, metadata={"Software": None})
