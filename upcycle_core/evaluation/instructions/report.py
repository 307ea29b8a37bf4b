"""The report on instructions: metrics.json, tables, pictures and one page that shows all of it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.instructions import page, plots, results, table
from upcycle_core.evaluation.instructions.activations import Activation
from upcycle_core.evaluation.instructions.results import InstructionEvaluation
from upcycle_core.evaluation.instructions.structure import Structure
from upcycle_core.evaluation.text.table import csv_text

STRUCTURE = (
    "Share of expert parameters whose mask is not zero, by layer type and by depth (Fig. 4 of "
    "SIMoE): bars are the mean over experts, error bars their standard deviation, the dashed line "
    "is the mean of the whole model. Outside the layers: the final norm, and the output head where "
    "it has experts."
)
OVERLAP = (
    "Overlap of two experts (Fig. 5 of SIMoE): mask entries that both use, in percent of those "
    "that at least one of them uses."
)
ACTIVATIONS = (
    "Mean expert coefficients by task (Fig. 2 of SIMoE): tasks are joined by the Euclidean "
    "distance of their means, average linkage."
)


def write_instruction_report(
    out: Path,
    evaluation: InstructionEvaluation,
    *,
    structures: Mapping[str, Structure] | None = None,
    activations: Sequence[Activation] = (),
) -> None:
    """Write the whole report into ``out``; the same inputs give the same bytes.

    ``table.txt``, ``table.md``, ``scores.csv``; ``structure_{row}.png`` of every row in
    ``structures``, ``overlap.png`` of all of them, ``activations.png``, each with the CSV behind
    it (``dendrogram.csv`` for the tree); ``report.html`` with everything; and ``metrics.json``::

        {"highlight": row,
         "rows": {row: {
            "title", "groups": [...],
            "total_parameters", "trained_parameters", "density_parameters": S or null,
            "seen", "unseen": null or {
                "exact_match": S, "rouge_l": S,       means over categories
                "count": instances, "truncated": prompts that were cut, the most of any seed,
                "categories": {category: {"exact_match": S, "rouge_l": S, "count"}}},
            "runs": [one a seed, plain numbers in the place of S; what S are made of]}},
         "structures": {row: {"by_type": {type: [M]}, "by_depth": {layer: [M]}, "total": [M],
            "density", "union", "parameters", "overlap": [M][M], "mean_overlap"}},
         "activations": [{"name", "domain", "coefficients": [M], "count"}]}

    where S is ``{"mean", "deviation"}`` over seeds, and all scores are shares, 0 to 1.

    Args:
        out: The directory.
        evaluation: What was measured.
        structures: {row of the evaluation: its experts}, in the order of the panels: the paper's
            Fig. 5 is the row without the orthogonality penalty, then the one with it.
        activations: Of the highlighted row.

    Raises:
        InputError: Rows, runs or numbers are missing or do not fit together; nothing is written.
    """
    structures = structures or {}
    raise_faults([*results.faults(evaluation), *_faults(evaluation, structures, activations)])
    rows = results.metrics(evaluation)
    found = {
        "highlight": evaluation.highlight,
        "rows": rows,
        "structures": {row: own.to_dict() for row, own in structures.items()},
        "activations": [own.to_dict() for own in activations],
    }
    text = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "metrics.json", text + "\n")
    _write(out / "table.txt", table.format_tables(rows))
    _write(out / "table.md", table.markdown_tables(rows))
    _write(out / "scores.csv", table.csv_scores(rows))
    titles = {row: evaluation.rows[row].title for row in structures}
    pictures = _write_structures(out, structures, titles)
    if activations:
        _write_activations(out, activations)
        pictures["Which experts tasks use"] = (out / "activations.png", ACTIVATIONS)
    _write(out / "report.html", page.render(rows, pictures))


def structure_csv(structure: Structure) -> str:
    """Unrounded: one line a group and expert, then its mean and deviation over experts."""
    lines: list[list[Any]] = []
    groups = {"type": structure.by_type, "depth": structure.by_depth}
    for by, shares in {**groups, "all": {"all": structure.total}}.items():
        for group, own in shares.items():
            numbers = [(str(expert + 1), share) for expert, share in enumerate(own)]
            mean, deviation = plots.spread(own)
            ends = [("mean", mean), ("deviation", deviation)]
            lines += [[by, group, expert, share] for expert, share in [*numbers, *ends]]
    return csv_text(["by", "group", "expert", "share"], lines)


def overlap_csv(overlaps: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Unrounded: one line a model and pair, experts from 1."""
    lines = [
        (title, i + 1, j + 1, value)
        for title, square in overlaps.items()
        for i, row in enumerate(square)
        for j, value in enumerate(row)
    ]
    return csv_text(["model", "first", "second", "overlap"], lines)


def _write_structures(
    out: Path, structures: Mapping[str, Structure], titles: Mapping[str, str]
) -> dict[str, tuple[Path, str]]:
    """Draw them; {heading: (PNG, what it shows)}."""
    pictures: dict[str, tuple[Path, str]] = {}
    for row, structure in structures.items():
        path = out / f"structure_{_slug(row)}.png"
        _write(path.with_suffix(".csv"), structure_csv(structure))
        plots.draw_structure(structure, path)
        pictures[f"Where experts are: {titles[row]}"] = (path, STRUCTURE)
    if structures:
        overlaps = {titles[row]: own.overlap for row, own in structures.items()}
        _write(out / "overlap.csv", overlap_csv(overlaps))
        plots.draw_overlap(overlaps, out / "overlap.png")
        pictures["What experts share"] = (out / "overlap.png", OVERLAP)
    return pictures


def _write_activations(out: Path, activations: Sequence[Activation]) -> None:
    tree = plots.linkage_of(activations)
    order = plots.leaves(tree, len(activations))
    experts = len(activations[0].coefficients)
    head = ["domain", "name", "count", *(f"expert_{i + 1}" for i in range(experts))]
    ordered = [activations[place] for place in order]
    lines = [(own.domain, own.name, own.count, *own.coefficients) for own in ordered]
    _write(out / "activations.csv", csv_text(head, lines))
    labels = [own.label for own in activations]
    labels += [f"merge {step + 1}" for step in range(len(tree))]
    merges = [
        (f"merge {step + 1}", labels[int(left)], labels[int(right)], height, int(size))
        for step, (left, right, height, size) in enumerate(tree)
    ]
    head = ["merge", "first", "second", "distance", "tasks"]
    _write(out / "dendrogram.csv", csv_text(head, merges))
    plots.draw_activations(activations, out / "activations.png")


def _faults(
    evaluation: InstructionEvaluation,
    structures: Mapping[str, Structure],
    activations: Sequence[Activation],
) -> list[Fault]:
    found = [
        Fault(f"structures.{row}", None, "no row of the evaluation; evaluate this model too")
        for row in structures
        if row not in evaluation.rows
    ]
    slugs = [_slug(row) for row in structures]
    if len(set(slugs)) < len(slugs):
        found.append(Fault("structures", slugs, "names must differ in letters or digits"))
    widths = {len(own.coefficients) for own in activations}
    if len(widths) > 1:
        remedy = "every task needs a coefficient for every expert"
        found.append(Fault("activations", sorted(widths), remedy))
    labels = [own.label for own in activations]
    if len(set(labels)) < len(labels):
        found.append(Fault("activations", labels, "give every task a name of its own"))
    return found


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
