"""Stage ``ablation``: the report of joined strangers: every model before and after training."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from infra.cluster.compute import Done, Piece
from infra.recipe.schema import SYMPHONY, Recipe
from tasks.engine.artifacts import ALIGNMENT, DOCUMENTS, SUMMARY, TOKENS
from tasks.engine.params import MEASURING
from tasks.engine.stage import StageRun, each, stage
from tasks.scoring.evaluation import average_piece, champion_piece
from upcycle_core.baselines.config import Baseline
from upcycle_core.evaluation.report.parts import Figure, Section
from upcycle_core.evaluation.text.ablation import (
    Joined,
    ablation_figure,
    ablation_metrics,
    ablation_table,
)
from upcycle_core.evaluation.text.alignment import alignment_table, draw_alignment
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import (
    Scores,
    Variant,
    evaluate_checkpoint,
    evaluate_moe,
    evaluate_own_experts,
)
from upcycle_core.evaluation.text.report import write_report
from upcycle_core.evaluation.text.results import Evaluation, expert_row
from upcycle_core.evaluation.text.scores import Score
from upcycle_core.moe.size import parameter_counts
from upcycle_core.progress import Progress
from upcycle_core.symphony.config import SymphonyConfig

OTHERS = ("bam", "full-finetune")
"""Methods whose models are no stock Mixture-of-Experts."""
AVERAGE, HARMONISED = "model_averaging", "harmonised"


def _inputs(recipe: Recipe, item: str) -> list[str]:
    patterns = ("experts/{domain}", "documents/{domain}", "corpora/{domain}/heldout")
    found = [name for pattern in patterns for name in each(recipe, pattern)]
    found += [f"outside/{name}" for name in recipe.outside]
    found += [f"starts/{name}" for name in recipe.starts]
    rows = [f"baselines/{name}" for name in recipe.baselines]
    return [*found, *rows, "tokenizer", "united", "model"]


@stage(
    "report",
    inputs=_inputs,
    params=("name", *MEASURING, "baselines", "symphony", "post_training", "moe"),
)
def report(run: StageRun) -> None:
    """Write metrics.json, tables, pictures and the CSV behind them."""
    merged = run.run(_merged_pieces(run), "evaluation")
    heldout = {
        name: {"tokens": score["tokens"], "bytes": score["bytes"]}
        for name, score in merged[AVERAGE].result.items()
    }
    dense = run.run(_dense_pieces(run, heldout), "evaluation")
    perplexities = {row: piece.result for row, piece in dense.items()}
    recipe = run.recipe
    evaluation = _evaluation(recipe, perplexities, merged, heldout)
    assert recipe.symphony is not None
    anchor = perplexities[expert_row(recipe.anchor_of(recipe.symphony))]
    rows = ablation_metrics(
        evaluation.experts,
        _rows(run, perplexities, merged),
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
        more={"ablation": rows, "alignment": alignment},
        tables={"alignment.csv": alignment_table(alignment)},
    )


def _alignment(run: StageRun) -> dict[str, Any]:
    """{variant: what its alignment found, model by model}."""
    found = {}
    for name in run.recipe.variants:
        facts = json.loads((run.path(f"starts/{name}") / ALIGNMENT).read_text())
        if any(model["layers"] for model in facts.values()):
            found[name] = facts
    return found


def heldout_texts(run: StageRun, split: str = "heldout") -> dict[str, Path]:
    """Tokens of every text that is judged on, those from outside among them."""
    domains = {name: run.path(f"corpora/{name}/{split}") for name in run.recipe.domains}
    outside = {name: run.path(f"outside/{name}") / TOKENS / split for name in run.recipe.outside}
    return {**domains, **outside}


def _common(run: StageRun) -> dict[str, Any]:
    return {
        "corpora": heldout_texts(run),
        "config": run.recipe.evaluation,
        "device": run.device("evaluation"),
    }


def _merged_pieces(run: StageRun) -> list[Piece]:
    """Everything that reads the union's tokens: the average, and each row before and after."""
    recipe, common = run.recipe, _common(run)
    united = [run.path("united") / name for name in recipe.domains]
    average = {"experts": united, **common}
    pieces = [Piece(name=AVERAGE, function=average_piece, arguments=average)]
    for name in recipe.starts:
        row = recipe.baselines.get(name)
        kind = plain_piece if row is not None and row.method in OTHERS else moe_piece
        arguments = {**common, "experts": _own_experts(recipe, row)}
        start = {"model": run.path(f"starts/{name}"), **arguments}
        pieces.append(Piece(name=f"{name}.before", function=kind, arguments=start))
        trained = {"model": run.path("model" if row is None else f"baselines/{name}"), **arguments}
        if row is not None or recipe.post_training is not None:
            after = {**trained, "experts": {}}
            pieces.append(Piece(name=f"{name}.after", function=kind, arguments=after))
    return pieces


def _own_experts(recipe: Recipe, row: Baseline | None) -> dict[str, int]:
    """{domain: its expert's place, or the anchor's where it has none}."""
    config = recipe.variants[SYMPHONY] if row is None else row.symphony or SymphonyConfig()
    chosen = config.models or tuple(recipe.domains)
    anchor = recipe.anchor_of(config)
    return {name: chosen.index(name if name in chosen else anchor) for name in recipe.domains}


def _dense_pieces(run: StageRun, heldout: Mapping[str, Mapping[str, float]]) -> list[Piece]:
    """Every stranger as it is, with its own tokenizer, per token of the union's."""
    recipe = run.recipe
    documents = {name: run.path(f"documents/{name}") for name in recipe.domains}
    documents |= {name: run.path(f"outside/{name}") / DOCUMENTS for name in recipe.outside}
    arguments = {
        "tokenizer": run.path("tokenizer"),
        "documents": documents,
        "corpora": heldout_texts(run),
        "config": recipe.evaluation,
        "device": run.device("evaluation"),
        "reference": heldout,
    }
    return [
        Piece(
            name=expert_row(name),
            function=champion_piece,
            arguments={"model": run.path(f"experts/{name}"), **arguments},
        )
        for name in recipe.domains
    ]


def moe_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    corpora: Mapping[str, Path],
    experts: Mapping[str, int],
    config: EvaluationConfig,
    device: str,
) -> dict[str, Any]:
    """The piece: a MoE as it is, and with every domain sent to its own expert."""
    common: dict[str, Any] = {"config": config, "device": device, "progress": progress}
    found = evaluate_moe(model, {"routed": Variant()}, corpora, **common)["routed"]
    own = evaluate_own_experts(model, experts, corpora, **common) if experts else None
    return {**found, "own_expert": own}


def plain_piece(
    *, out: Path, progress: Progress, model: Path, experts: Mapping[str, int], **common: Any
) -> dict[str, Any]:
    """The piece: a model of another kind, as it is."""
    scores = evaluate_checkpoint(model, progress=progress, **common)
    return {"scores": scores, "own_expert": None}


def _evaluation(
    recipe: Recipe,
    dense: Mapping[str, Mapping[str, float]],
    merged: Mapping[str, Done],
    heldout: Mapping[str, Mapping[str, float]],
) -> Evaluation:
    """What the report of any method shows."""
    final = merged[_final(recipe)].result
    rows = {AVERAGE: _perplexities(merged[AVERAGE].result)}
    for name, piece in merged.items():
        if name.endswith(".after"):
            rows[name.removesuffix(".after")] = _perplexities(piece.result["scores"])
    rows[HARMONISED] = _perplexities(merged[f"{SYMPHONY}.before"].result["scores"])
    rows[SYMPHONY] = _perplexities(final["scores"])
    domains = tuple(recipe.domains)
    assert recipe.symphony is not None
    all_models = recipe.symphony.models is None or len(recipe.symphony.models) == len(domains)
    return Evaluation(
        domains=domains,
        perplexities={**dense, **rows},
        heldout={name: heldout[name] for name in domains},
        routing={name: final["routing"][name] for name in domains} if all_models else {},
    )


def _final(recipe: Recipe) -> str:
    return f"{SYMPHONY}.{'before' if recipe.post_training is None else 'after'}"


def _rows(
    run: StageRun, dense: Mapping[str, Mapping[str, float]], merged: Mapping[str, Done]
) -> dict[str, Joined]:
    recipe = run.recipe
    rows = {}
    for name in recipe.domains:
        size = parameter_counts(run.path(f"experts/{name}"))
        rows[expert_row(name)] = Joined(
            title=f"{name}, dense",
            before=dense[expert_row(name)],
            parameters=(size.total, size.active),
        )
    size = parameter_counts(run.path("united") / next(iter(recipe.domains)))
    averaged = _perplexities(merged[AVERAGE].result)
    rows[AVERAGE] = Joined(
        title="Average of the dense", before=averaged, parameters=(size.total, size.active)
    )
    for name in recipe.starts:
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
        before=_perplexities(before["scores"]),
        after=None if after is None else _perplexities(after.result["scores"]),
        own_expert=None if own is None else _perplexities(own),
        parameters=(size.total, size.active),
        tokens=tokens,
    )


def _perplexities(scores: Scores) -> dict[str, float]:
    return {name: Score.from_dict(score).perplexity for name, score in scores.items()}
