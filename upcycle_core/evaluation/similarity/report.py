"""The report on how alike experts are: metrics, CSV, pictures and a page in plain words."""

from dataclasses import asdict, fields
from pathlib import Path

from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.report.files import to_csv, write_json, write_markdown_page, write_text
from upcycle_core.evaluation.report.numbers import number
from upcycle_core.evaluation.report.parts import Notes, Report, Section, Table
from upcycle_core.evaluation.similarity.config import Representation
from upcycle_core.evaluation.similarity.measure import PairSimilarity
from upcycle_core.evaluation.similarity.plot import draw_layers, draw_pairs
from upcycle_core.evaluation.similarity.results import (
    Stage,
    Stages,
    metrics,
    representations,
    unmoved,
)

_FEATURES: dict[Representation, str] = {
    "neurons": "Neurons: act(gate) * up, what down_proj reads",
    "outputs": "Outputs: what the FFN adds to the residual stream",
}
_METHOD = """\
**What was measured.** Linear CKA of two experts at one layer, from centred features X and Y of the
same positions of text: ||YᵀX||² / (||XᵀX|| ||YᵀY||), in Frobenius norms, 1 for the same features
and near 0 for unrelated ones. Beside it the correlation of neuron j of one expert with neuron j of
the other, averaged over j ("matched"; for outputs, coordinate j of the residual stream), and what
the best one-to-one matching of neurons would reach ("best"). Every number is a mean over all pairs
of experts.
"""
_INPUTS = {
    "own": "Dense models run alone, each on its own hidden states of the same text.",
    "shared": "Experts of a MoE are all applied to the same input: what their layer's router reads "
    "in the model's own forward pass. A shared expert, and the router's weights, are left out.",
}
_INVARIANT = """\
**What follows for the Symphony-MoE paper's Figure 3.** The paper shows a lower CKA between experts
after functional alignment than without it, and takes that for specialisation won back. Aligning
neurons puts the same neurons in another order, and linear CKA of the same features is the same in
any order: a permuted X leaves all three norms what they were. The same holds for outputs, which a
permutation of neurons does not change at all, and for any rotation of the residual stream. So
aligning neurons cannot by itself have moved the figure. Nor can post-training bring a difference
out of it: the MoE keeps every expert's FFN whole, and AdamW treats each weight by itself, so from
the same seed the model with permuted neurons stays a permuted copy of the other, up to rounding.
What the figure shows must come from other data, another backbone, other training, or a
representation that the paper does not name. What the alignment does change is which neurons stand
opposite each other: the matched correlation.
"""


def write_report(stages: Stages, out: Path) -> None:
    """Write ``similarity.json``, ``.csv``, ``.md``, ``.png`` and a PNG of pairs a representation.

    The same stages give the same bytes.

    Raises:
        InputError: A stage compares nothing; nothing is written.
    """
    empty = [key for key, stage in stages.items() if not stage.pairs]
    if empty or not stages:
        raise InputError(Fault("stages", empty, "nothing is compared; give two experts or more"))
    write_json(out / "similarity.json", metrics(stages))
    write_text(out / "similarity.csv", to_csv(_pairs(stages)))
    write_markdown_page(page(stages), out / "similarity.md")
    draw_layers(stages, out / "similarity.png")
    for representation in representations(stages):
        draw_pairs(stages, representation, out / f"similarity_{representation}.png")


def page(stages: Stages) -> Report:
    """Method, a table per representation, which stages CKA cannot tell apart."""
    kinds = dict.fromkeys(stage.inputs for stage in stages.values())
    return Report(
        "How alike the experts are",
        [
            Section("", [_METHOD, " ".join(_INPUTS[kind] for kind in kinds)]),
            *(
                Section(_FEATURES[own], [_table(stages, own), Notes(_notes(stages, own))])
                for own in representations(stages)
            ),
            Section("", [_INVARIANT]),
        ],
    )


def _table(stages: Stages, representation: Representation) -> Table:
    rows = [
        [stage.title, *_cells(stage, representation)]
        for stage in stages.values()
        if stage.of(representation)
    ]
    return Table(["Experts", "CKA", "lowest layer", "highest layer", "matched", "best"], rows)


def _cells(stage: Stage, representation: Representation) -> list[str]:
    by_layer = [stage.mean(representation, "cka", layer) for layer in stage.layers()]
    known = [value for value in by_layer if value is not None]
    values = [stage.mean(representation, "cka"), min(known, default=None), max(known, default=None)]
    values += [stage.mean(representation, "matched"), stage.mean(representation, "best")]
    return [number(value, digits=3) for value in values]


def _notes(stages: Stages, representation: Representation) -> list[str]:
    pairs = [pair for stage in stages.values() for pair in stage.of(representation)]
    rows, features = min(pair.rows for pair in pairs), pairs[0].features
    notes = [
        f"{rows:,} positions, {features:,} features. Few positions raise CKA: independent features "
        f"of equal variance would show {features / (rows + features):.3f}."
    ]
    for first, second in unmoved(stages, representation):
        matched = [stage.mean(representation, "matched") for stage in (first, second)]
        if None not in matched:
            notes.append(
                f'"{first.title}" and "{second.title}" have the same CKA at every layer and pair; '
                f"their matched correlation is {matched[0]:.3f} and {matched[1]:.3f}."
            )
    constant = max(max(pair.constant_first, pair.constant_second) for pair in pairs)
    if constant:
        notes.append(
            f"Up to {constant} features of an expert never vary; they correlate with nothing."
        )
    return notes


def _pairs(stages: Stages) -> Table:
    """Every pair at every layer, unrounded."""
    rows = [[key, *asdict(pair).values()] for key, stage in stages.items() for pair in stage.pairs]
    return Table(["stage", *(field.name for field in fields(PairSimilarity))], rows)
