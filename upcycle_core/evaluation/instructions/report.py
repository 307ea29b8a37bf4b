"""The report on instructions: scores by set and category, where experts are and who uses them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.instructions import plots, results
from upcycle_core.evaluation.instructions.activations import Activation
from upcycle_core.evaluation.instructions.results import InstructionEvaluation
from upcycle_core.evaluation.instructions.scores import METRICS, SPLITS, Metric, Split
from upcycle_core.evaluation.instructions.structure import Structure
from upcycle_core.evaluation.report import files
from upcycle_core.evaluation.report.numbers import amount, cells, slug
from upcycle_core.evaluation.report.parts import (
    Cell,
    Figure,
    Notes,
    Report,
    Section,
    Table,
    by_columns,
)
from upcycle_core.evaluation.text.scores import mean_and_deviation

Rows = Mapping[str, Any]
"""{row: everything about it}: what ``results.metrics`` gives."""
NAMES: dict[Metric, str] = {"exact_match": "exact match", "rouge_l": "ROUGE-L"}
USE = {"Effective experts": ("effective_experts", 1), "Tasks apart": ("tasks_apart", 2)}
"""Columns of how prompts use experts, with their digits."""
ACROSS = 14
"""More categories than this stand below each other, models beside each other."""
CAPTION = (
    "Exact match and ROUGE-L in percent, the mean over task categories, each counting the same."
    " Unseen: categories that training did not have. Marked: the best model. Parameters: of the"
    " saved model without its masks; by density: the pre-trained model's and the masks' mean "
    "density times the experts' (the paper's count); trained: those that training changes. "
    "Effective experts: exp of the entropy of the mean coefficients; one is no mixture. Tasks "
    "apart: how much of that entropy tasks explain, in nats; 0 where all use the experts alike."
)
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
    model: str,
    structures: Mapping[str, Structure] | None = None,
    activations: Sequence[Activation] = (),
) -> None:
    """Write the whole report into ``out``; the same inputs give the same bytes.

    What ``report.files.write_report`` writes, and ``scores.csv``; pictures are
    ``structure_{row}`` of every row in ``structures``, ``overlap`` of all of them and
    ``activations``, with ``dendrogram.csv`` for its tree. ``metrics.json``::

        {"highlight": row,
         "rows": {row: {
            "title", "groups": [...],
            "total_parameters", "trained_parameters", "density_parameters": S or null,
            "effective_experts": S or null, "tasks_apart": S or null,
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
        model: What people call the recipe's model.
        structures: {row of the evaluation: its experts}, in the order of the panels: the paper's
            Fig. 5 is the row without the orthogonality penalty, then the one with it.
        activations: Of the highlighted row.

    Raises:
        InputError: Rows, runs or numbers are missing or do not fit together; nothing is written.
    """
    structures = structures or {}
    raise_faults([*results.faults(evaluation), *_faults(evaluation, structures, activations)])
    rows = results.metrics(evaluation)
    metrics = {
        "highlight": evaluation.highlight,
        "rows": rows,
        "structures": {row: own.to_dict() for row, own in structures.items()},
        "activations": [own.to_dict() for own in activations],
    }
    tables = {"scores.csv": _score_numbers(rows)}
    if activations:
        tables["dendrogram.csv"] = _merges(activations)
    pictures = _pictures(structures, {row: own.title for row, own in evaluation.rows.items()})
    if activations:
        pictures["Which experts tasks use"] = _activations(activations)
    shown = [Section(title, [own], page_only=True) for title, own in pictures.items()]
    report = Report(f"{model}: answers to instructions", [*sections(rows), *shown])
    files.write_report(report, out, metrics=metrics, tables=tables)


def sections(rows: Rows) -> list[Section]:
    """A table a group of rows, then the first group's by category, unseen and seen; notes."""
    groups = dict.fromkeys(group for row in rows.values() for group in row["groups"])
    members = [
        {name: row for name, row in rows.items() if group in row["groups"]} for group in groups
    ]
    tables = {g: _group_table(own) for g, own in zip(groups, members, strict=True)}
    for split in ("unseen", "seen"):
        asked = {name: row for name, row in members[0].items() if row[split] is not None}
        for metric in ("rouge_l", "exact_match"):
            if asked:
                heading = f"{split.capitalize()} categories, {NAMES[metric]}"
                tables[heading] = _category_table(asked, split, metric)
    shown = [Section(heading, [table]) for heading, table in tables.items()]
    return [*shown, Section("", [CAPTION, Notes(notes(rows))])]


def notes(rows: Rows) -> list[str]:
    """What a reader must know besides: seeds, sizes of the sets, prompts that were cut."""
    found = []
    seeds = {len(row["runs"]) for row in rows.values()}
    if max(seeds) > 1:
        many = f"{max(seeds)} seeds" if len(seeds) == 1 else "several seeds"
        found.append(f"Mean ± sample standard deviation over {many}.")
    for split in ("unseen", "seen"):
        asked = [row for row in rows.values() if row[split] is not None]
        if asked:
            own = asked[0][split]
            sizes = f"{own['count']:,} instances of {len(own['categories'])} categories"
            found.append(f"{split.capitalize()}: {sizes}.")
        cut: dict[int, list[str]] = {}
        for row in asked:
            cut.setdefault(row[split]["truncated"], []).append(row["title"])
        found += [
            f"{split.capitalize()}, prompts that lost tokens from the left to fit the model: "
            f"{count:,} of {', '.join(titles)}."
            for count, titles in cut.items()
            if count
        ]
    return found


def structure_numbers(structure: Structure) -> Table:
    """Unrounded: one line a group and expert, then its mean and deviation over experts."""
    lines: list[list[Any]] = []
    groups = {"type": structure.by_type, "depth": structure.by_depth}
    for by, shares in {**groups, "all": {"all": structure.total}}.items():
        for group, own in shares.items():
            ends = zip(("mean", "deviation"), mean_and_deviation(own), strict=True)
            values = [*enumerate(own, 1), *ends]
            lines += [[by, group, expert, share] for expert, share in values]
    return Table(["by", "group", "expert", "share"], lines)


def _group_table(rows: Rows) -> Table:
    counts = {"Parameters": "total_parameters", "Trained": "trained_parameters"}
    if any(row["density_parameters"] for row in rows.values()):
        counts = {"Parameters": "total_parameters", "By density": "density_parameters"} | counts
    columns: dict[str, Mapping[str, object]] = {
        title: {row: amount(own[name]["mean"]) for row, own in rows.items() if own[name]}
        for title, name in counts.items()
    }
    for title, (name, digits) in USE.items():
        used = {row: own[name]["mean"] for row, own in rows.items() if own[name]}
        if used:
            columns[title] = {row: f"{value:.{digits}f}" for row, value in used.items()}
    for split in SPLITS:
        for metric in METRICS:
            scores = {name: row[split][metric] for name, row in rows.items() if row[split]}
            if scores:
                columns[f"{split.capitalize()}, {NAMES[metric]}"] = _cells(rows, scores)
    return by_columns(_titles(rows), columns)


def _category_table(rows: Rows, split: Split, metric: Metric) -> Table:
    columns = {}
    for category in next(iter(rows.values()))[split]["categories"]:
        scores = {name: row[split]["categories"][category][metric] for name, row in rows.items()}
        columns[category] = _cells(rows, scores)
    columns["Average"] = _cells(rows, {name: row[split][metric] for name, row in rows.items()})
    if len(columns) - 1 <= ACROSS:
        return by_columns(_titles(rows), columns)
    header = ["Category", *_titles(rows).values()]
    return Table(header, [[category, *own.values()] for category, own in columns.items()])


def _cells(rows: Rows, scores: Mapping[str, Mapping[str, float]]) -> dict[str, Cell]:
    """Percent, with the deviation where there are several seeds."""
    spread = {name: 100 * own["deviation"] for name, own in scores.items()}
    several = {name for name, row in rows.items() if len(row["runs"]) > 1}
    return cells(
        {
            name: (100 * own["mean"], spread[name] if name in several else None)
            for name, own in scores.items()
        }
    )


def _titles(rows: Rows) -> dict[str, str]:
    return {name: row["title"] for name, row in rows.items()}


def _score_numbers(rows: Rows) -> Table:
    """Unrounded: one line a row, set and category; category ``mean`` is the mean over them."""
    header = ["row", "title", "split", "category", "count"]
    header += [f"{metric}{kind}" for metric in METRICS for kind in ("", "_deviation")]
    lines = []
    for name, row in rows.items():
        for split in SPLITS:
            own = row[split] or {"categories": {}}
            whole = {"mean": own} if row[split] else {}
            for category, score in {**whole, **own["categories"]}.items():
                numbers = [
                    score[metric][kind] for metric in METRICS for kind in ("mean", "deviation")
                ]
                lines.append([name, row["title"], split, category, score["count"], *numbers])
    return Table(header, lines)


def _pictures(structures: Mapping[str, Structure], titles: Mapping[str, str]) -> dict[str, Figure]:
    """{heading: where experts are, row by row, and what they share}."""
    pictures = {}
    for row, structure in structures.items():
        heading, data = f"Where experts are: {titles[row]}", structure_numbers(structure)
        draw = partial(plots.draw_structure, structure)
        pictures[heading] = Figure(f"structure_{slug(row)}", heading, draw, data, STRUCTURE)
    if structures:
        overlaps = {titles[row]: own.overlap for row, own in structures.items()}
        lines = [
            (title, i + 1, j + 1, value)
            for title, square in overlaps.items()
            for i, row in enumerate(square)
            for j, value in enumerate(row)
        ]
        heading, draw = "What experts share", partial(plots.draw_overlap, overlaps)
        data = Table(["model", "first", "second", "overlap"], lines)
        pictures[heading] = Figure("overlap", heading, draw, data, OVERLAP)
    return pictures


def _activations(activations: Sequence[Activation]) -> Figure:
    order = plots.leaves(plots.linkage_of(activations), len(activations))
    lines = [
        (own.domain, own.name, own.count, *own.coefficients)
        for own in (activations[place] for place in order)
    ]
    experts = [f"expert_{i + 1}" for i in range(len(activations[0].coefficients))]
    data = Table(["domain", "name", "count", *experts], lines)
    draw = partial(plots.draw_activations, activations)
    return Figure("activations", "Which experts tasks use", draw, data, ACTIVATIONS)


def _merges(activations: Sequence[Activation]) -> Table:
    """The tree of tasks: what is joined, and how far apart it was."""
    tree = plots.linkage_of(activations)
    labels = [own.label for own in activations]
    labels += [f"merge {step + 1}" for step in range(len(tree))]
    lines = [
        (f"merge {step + 1}", labels[int(left)], labels[int(right)], height, int(size))
        for step, (left, right, height, size) in enumerate(tree)
    ]
    return Table(["merge", "first", "second", "distance", "tasks"], lines)


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
    slugs = [slug(row) for row in structures]
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
