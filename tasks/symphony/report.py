"""Stage ``report``: the report of joined strangers: every model before and after training."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.cluster.memory import Room
from infra.cluster.pieces import Done, Piece
from infra.recipe.schema import Recipe
from tasks.data.given import forms
from tasks.engine.artifacts import ALIGNMENT, DOCUMENTS, SUMMARY, TOKENS
from tasks.engine.params import MEASURING
from tasks.engine.stage import StageRun, each, stage
from tasks.scoring.evaluation import (
    HELDOUT,
    average_piece,
    counts,
    dense_piece,
    heldout_arguments,
    heldout_file,
    perplexities,
    reference_of,
    score_intervals,
    scores_of,
    stranger_piece,
)
from tasks.scoring.room import scoring_folder
from tasks.symphony.variants import (
    SYMPHONY,
    anchor_of,
    chosen_of,
    section,
    starts,
    variants,
)
from upcycle_core.baselines.config import Baseline
from upcycle_core.evaluation.report.parts import Figure, Section
from upcycle_core.evaluation.text.ablation import (
    Joined,
    ablation_figure,
    ablation_metrics,
    ablation_table,
)
from upcycle_core.evaluation.text.alignment import alignment_table, draw_alignment
from upcycle_core.evaluation.text.pieces import (
    Scores,
    Variant,
    evaluate_moe,
    evaluate_own_experts,
)
from upcycle_core.evaluation.text.report import write_report
from upcycle_core.evaluation.text.results import Evaluation, expert_row
from upcycle_core.moe.size import parameter_counts
from upcycle_core.progress import Progress
from upcycle_core.symphony.config import SymphonyConfig

OTHERS = ("bam", "full-finetune")
"""Methods whose models are no stock Mixture-of-Experts."""
AVERAGE, HARMONISED = "model_averaging", "harmonised"
SCORING = ("name", *MEASURING, "evaluation.cross_scores", "corpus.bos")


def _inputs(recipe: Recipe, item: str) -> list[str]:
    patterns = ("experts/{domain}", "documents/{domain}", "corpora/{domain}/heldout")
    found = [name for pattern in patterns for name in each(recipe, pattern)]
    found += [f"outside/{name}" for name in recipe.outside]
    found += [f"starts/{name}" for name in starts(recipe)]
    rows = [f"baselines/{name}" for name in recipe.baselines]
    return [*found, *rows, "tokenizer", "united", "model"]


@stage("report", _inputs, params=(*SCORING, "baselines", "symphony", "post_training", "moe"))
def report(run: StageRun) -> None:
    """Write metrics.json, tables, pictures and the CSV behind them."""
    merged = run.run(_merged_pieces(run), "evaluation")
    judged = run.run(_dense_pieces(run, merged[AVERAGE].result), "evaluation")
    scores = {row: piece.result for row, piece in judged.items()}
    strangers = {row: perplexities(own) for row, own in scores.items()}
    recipe = run.recipe
    evaluation = _evaluation(recipe, scores, merged)
    anchor = strangers[expert_row(anchor_of(recipe, section(recipe)))]
    rows = ablation_metrics(
        evaluation.experts,
        _rows(run, strangers, merged),
        outside={name: anchor[name] for name in recipe.outside},
    )
    alignment = _alignment(run)
    picture = ablation_figure(rows, "ablation", highlight=(SYMPHONY,))
    first = [
        Section("Ways of joining the models", [ablation_table([rows])]),
        Section("", [picture], page_only=True),
    ]
    if SYMPHONY in alignment:
        title = "Alignment of the recipe's own way"
        picture = Figure("alignment", title, partial(draw_alignment, alignment[SYMPHONY]))
        first.append(Section(title, [picture], page_only=True))
    write_report(
        evaluation,
        run.out,
        model=recipe.name,
        first=first,
        given=forms(run),
        more={"ablation": rows, "alignment": alignment},
        tables={"alignment.csv": alignment_table(alignment)},
    )


def _alignment(run: StageRun) -> dict[str, Any]:
    """{variant: what its alignment found, model by model}."""
    found = {}
    for name in variants(run.recipe):
        facts = json.loads((run.path(f"starts/{name}") / ALIGNMENT).read_text())
        if any(model["layers"] for model in facts.values()):
            found[name] = facts
    return found


def _common(run: StageRun) -> dict[str, Any]:
    """What every piece is given: the text from outside is judged on as well."""
    outside = {n: run.path(f"outside/{n}") / TOKENS / "heldout" for n in run.recipe.outside}
    common = heldout_arguments(run)
    return {**common, "corpora": {**common["corpora"], **outside}, "config": run.recipe.evaluation}


def _merged_pieces(run: StageRun) -> list[Piece]:
    """Everything that reads the union's tokens: the average, and each row before and after."""
    recipe, common = run.recipe, _common(run)
    united = [run.path("united") / name for name in recipe.domains]
    pieces = [scores_of(AVERAGE, average_piece, experts=united, **common)]
    for name in starts(recipe):
        row = recipe.baselines.get(name)
        kind = plain_piece if row is not None and row.method in OTHERS else moe_piece
        start, own = run.path(f"starts/{name}"), _own_experts(recipe, row)
        pieces.append(Piece.of(f"{name}.before", kind, model=start, experts=own, **common))
        if row is not None or recipe.post_training is not None:
            trained = run.path("model" if row is None else f"baselines/{name}")
            pieces.append(Piece.of(f"{name}.after", kind, model=trained, experts={}, **common))
    return pieces


def _own_experts(recipe: Recipe, row: Baseline | None) -> dict[str, int]:
    """{domain: its expert's place, or the anchor's where it has none}."""
    config = section(recipe) if row is None else row.symphony or SymphonyConfig()
    chosen, anchor = chosen_of(recipe, config), anchor_of(recipe, config)
    return {name: chosen.index(name if name in chosen else anchor) for name in recipe.domains}


def _dense_pieces(run: StageRun, heldout: Scores) -> list[Piece]:
    """Every stranger as it is, with its own tokenizer, per token of the union's."""
    recipe, common = run.recipe, _common(run)
    documents = {name: run.path(heldout_file(name)) for name in recipe.domains}
    documents |= {n: run.path(f"outside/{n}") / DOCUMENTS / HELDOUT for n in recipe.outside}
    each = {
        "corpora": common["corpora"],
        "documents": documents,
        "reference": reference_of(heldout),
    }
    judged = {"tokenizer": run.path("tokenizer"), "bos": recipe.corpus.bos}
    pieces = []
    for name, chosen in _scored_on(recipe).items():
        texts = (*chosen, *recipe.outside)
        some = {part: {text: found[text] for text in texts} for part, found in each.items()}
        arguments = {"model": run.path(f"experts/{name}"), **judged, **common, **some}
        piece = Piece.of(expert_row(name), stranger_piece, **arguments)
        pieces.append(replace(piece, each=tuple(each)))
    return pieces


def _scored_on(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """{domain: the domains whose text its stranger is scored on}"""
    return {name: recipe.evaluation.scored_on(name, recipe.domains) for name in recipe.domains}


def moe_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    experts: Mapping[str, int],
    room: Room,
    **common: Any,
) -> dict[str, Any]:
    """The piece: a MoE as it is, and with every domain sent to its own expert."""
    folder = scoring_folder(room, out, model, config=common["config"], device=common["device"])
    common |= {"progress": progress, "streamed": folder}
    found = evaluate_moe(model, {"routed": Variant()}, **common)["routed"]
    own = evaluate_own_experts(model, experts, **common) if experts else None
    return {**found, "own_expert": own}


def plain_piece(*, experts: Mapping[str, int], **arguments: Any) -> dict[str, Any]:
    """The piece: a model of another kind, as it is."""
    return {"scores": dense_piece(**arguments), "own_expert": None}


def _evaluation(
    recipe: Recipe, dense: Mapping[str, Scores], merged: Mapping[str, Done]
) -> Evaluation:
    """What the report of any method shows."""
    final, average = merged[_final(recipe)].result, merged[AVERAGE].result
    rows = {**dense, AVERAGE: average}
    for name, piece in merged.items():
        if name.endswith(".after"):
            rows[name.removesuffix(".after")] = piece.result["scores"]
    rows[HARMONISED] = merged[f"{SYMPHONY}.before"].result["scores"]
    rows[SYMPHONY] = final["scores"]
    domains = tuple(recipe.domains)
    heldout = counts(average)
    all_models = len(chosen_of(recipe, section(recipe))) == len(domains)
    return Evaluation(
        domains=domains,
        perplexities={row: perplexities(scores) for row, scores in rows.items()},
        heldout={name: heldout[name] for name in domains},
        routing={name: final["routing"][name] for name in domains} if all_models else {},
        intervals=score_intervals(rows, {d: dense[expert_row(d)][d] for d in domains}),
        scored_on={expert_row(d): texts for d, texts in _scored_on(recipe).items()},
    )


def _final(recipe: Recipe) -> str:
    return f"{SYMPHONY}.{'before' if recipe.post_training is None else 'after'}"


def _rows(
    run: StageRun, dense: Mapping[str, Mapping[str, float]], merged: Mapping[str, Done]
) -> dict[str, Joined]:
    recipe = run.recipe
    rows = {}
    for name, texts in _scored_on(recipe).items():
        if len(texts) < len(recipe.domains):
            continue  # no mean over the domains
        size = parameter_counts(run.path(f"experts/{name}"))
        rows[expert_row(name)] = Joined(
            title=f"{name}, dense",
            before=dense[expert_row(name)],
            parameters=(size.total, size.active),
        )
    size = parameter_counts(run.path("united") / next(iter(recipe.domains)))
    averaged = perplexities(merged[AVERAGE].result)
    rows[AVERAGE] = Joined(
        title="Average of the dense", before=averaged, parameters=(size.total, size.active)
    )
    for name in starts(recipe):
        rows[name] = _row(run, name, merged)
    return rows


def _row(run: StageRun, name: str, merged: Mapping[str, Done]) -> Joined:
    row = run.recipe.baselines.get(name)
    before, after = merged[f"{name}.before"].result, merged.get(f"{name}.after")
    own, tokens = before["own_expert"], 0
    size = parameter_counts(run.path(f"starts/{name}"))
    if after is not None:
        trained = run.path("model" if row is None else f"baselines/{name}")
        tokens = json.loads((trained / SUMMARY).read_text())["tokens"]
    return Joined(
        title="This recipe" if row is None else row.title or name,
        before=perplexities(before["scores"]),
        after=None if after is None else perplexities(after.result["scores"]),
        own_expert=None if own is None else perplexities(own),
        parameters=(size.total, size.active),
        tokens=tokens,
    )
