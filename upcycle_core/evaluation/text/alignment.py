"""What an alignment found, layer by layer: records for a table and a picture."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.report.canvas import ACCENTS, FAINT, new_figure, save

HEADER = (
    "row",
    "model",
    "layer",
    "neurons_before",
    "neurons_after",
    "neurons_moved",
    "neurons_aligned",
    "neurons_dead",
    "anchor_dead",
    "heads_before",
    "heads_after",
    "heads_moved",
    "residual_before",
    "residual_after",
)
Facts = Mapping[str, Mapping[str, Any]]
"""{model: what ``symphony.align.alignment_facts`` gave}"""


def alignment_records(rows: Mapping[str, Facts]) -> Iterator[tuple[Any, ...]]:
    """One record a row, model and layer, as ``HEADER`` names them; empty where nothing was aligned.

    Args:
        rows: {row: facts of its models}.
    """
    for row, models in rows.items():
        for model, facts in models.items():
            residual = facts["residual"] or {}
            for layer in facts["layers"]:
                neurons, heads = layer["neurons"] or {}, layer["heads"] or {}
                yield (
                    row,
                    model,
                    layer["layer"],
                    *(neurons.get(key, "") for key in ("before", "after", "moved", "aligned")),
                    *(neurons.get(key, "") for key in ("dead", "dead_anchor")),
                    *(heads.get(key, "") for key in ("before", "after", "moved")),
                    *(residual.get(key, "") for key in ("before", "after")),
                )


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
    with new_figure(4.6 * len(parts), 3.4) as figure:
        for ax, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            for index, (model, found) in enumerate(facts.items()):
                colour = ACCENTS[index % len(ACCENTS)]
                layers = [layer["layer"] for layer in found["layers"] if layer[part]]
                values = [layer[part] for layer in found["layers"] if layer[part]]
                before, after = ([value[key] for value in values] for key in ("before", "after"))
                ax.plot(layers, before, "--", color=colour, alpha=0.6)
                ax.plot(layers, after, "o-", color=colour, ms=4, label=model)
            ax.set_title(f"{part}: mean similarity to the anchor's")
            ax.set_xlabel("layer")
            ax.set_xticks(sorted({layer["layer"] for f in facts.values() for layer in f["layers"]}))
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
            ax.grid(color=FAINT, alpha=0.18)
            ax.legend(frameon=False)
        save(figure, path)
