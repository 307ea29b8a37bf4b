"""What an alignment found, layer by layer: a table for a CSV and a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.parts import Table

COLUMNS = {
    "neurons": {
        **{key: f"neurons_{key}" for key in ("before", "after", "moved", "aligned", "dead")},
        "dead_anchor": "anchor_dead",
    },
    "heads": {key: f"heads_{key}" for key in ("before", "after", "moved")},
    "residual": {key: f"residual_{key}" for key in ("before", "after")},
}
"""{part: {figure: its column}}"""
Facts = Mapping[str, Mapping[str, Any]]
"""{model: what ``symphony.align.alignment_facts`` gave}"""


def alignment_table(rows: Mapping[str, Facts]) -> Table:
    """One line a row, model and layer, with ``COLUMNS``; none where nothing was aligned.

    Args:
        rows: {row: facts of its models}.
    """
    header = [column for part in COLUMNS.values() for column in part.values()]
    lines = []
    for row, models in rows.items():
        for model, facts in models.items():
            for layer in facts["layers"]:
                line = [row, model, layer["layer"]]
                for part, columns in COLUMNS.items():
                    own = {**layer, "residual": facts["residual"]}[part] or {}
                    line += [own.get(key) for key in columns]
                lines.append(line)
    return Table(["row", "model", "layer", *header], lines)


def draw_alignment(facts: Facts, path: Path) -> None:
    """Mean similarity to the anchor, layer by layer, before (dashed) and after (solid).

    Args:
        facts: Of one row; at least one of its models has aligned neurons or heads.
        path: The PNG to write.
    """
    parts = [
        part
        for part in ("neurons", "heads")
        if any(layer[part] for found in facts.values() for layer in found["layers"])
    ]
    with canvas.new_figure(4.6 * len(parts), 3.4) as figure:
        for ax, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            for index, (model, found) in enumerate(facts.items()):
                colour = canvas.ACCENTS[index % len(canvas.ACCENTS)]
                layers = [layer["layer"] for layer in found["layers"] if layer[part]]
                values = [layer[part] for layer in found["layers"] if layer[part]]
                before, after = ([value[key] for value in values] for key in ("before", "after"))
                ax.plot(layers, before, "--", color=colour, alpha=0.6)
                ax.plot(layers, after, "o-", color=colour, ms=4, label=model)
            ax.set_title(f"{part}: mean similarity to the anchor's")
            ax.set_xlabel("layer")
            ax.set_xticks(sorted({layer["layer"] for f in facts.values() for layer in f["layers"]}))
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
            ax.grid(color=canvas.FAINT, alpha=0.18)
            ax.legend(frameon=False)
        canvas.save(figure, path)
