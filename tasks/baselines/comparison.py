"""Stage ``comparison``: every way of upcycling on the same held-out text, in one table."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.dume.files import ROUTED, repairs_routed
from tasks.engine.artifacts import SUMMARY
from tasks.engine.costs import Cost, read_cost
from tasks.engine.params import MEASURING
from tasks.engine.stage import StageRun, each, stage
from tasks.engine.workspace import Workspace
from tasks.scoring.evaluation import (
    dense_piece,
    held_arguments,
    heldout_arguments,
    perplexities,
    scores_of,
)
from upcycle_core.baselines.ensemble import evaluate_ensemble
from upcycle_core.evaluation.text.comparison import Compared, comparison_metrics
from upcycle_core.evaluation.text.pieces import Scores
from upcycle_core.evaluation.text.results import expert_row, title_of
from upcycle_core.moe.size import Counts, parameter_counts
from upcycle_core.progress import Progress

REPORTED = ("seed", "model_averaging", "random_routing", "dume", "oracle")
"""Rows of the DUME report that a comparison takes over; the experts normalise all of them."""
MERGED = ("random_routing", "dume", "oracle")
"""Of these, the ones that are the assembled model with one router or another."""


def _inputs(recipe: Recipe, item: str) -> list[str]:
    patterns = ("experts/{domain}", "corpora/{domain}/heldout")
    found = [name for pattern in patterns for name in each(recipe, pattern)]
    trained = [f"baselines/{name}" for name, row in recipe.baselines.items() if row.trains]
    return [*found, *trained, "model", "report"]


def _tokens(recipe: Recipe) -> list[str]:
    """What the tokens of the experts are counted from."""
    return ["experts.training"] if recipe.trains_experts else []


@stage(
    "comparison", _inputs, params=lambda recipe, item: (*MEASURING, "baselines", *_tokens(recipe))
)
def comparison(run: StageRun) -> None:
    """Write metrics.json: scores, parameters and tokens of every row."""
    recipe = run.recipe
    report = json.loads((run.path("report") / "metrics.json").read_text())
    rows = {name: _reported(run, name, report) for name in REPORTED if name in report["perplexity"]}
    common = heldout_arguments(run)
    trained = {"experts": {domain: run.path(f"experts/{domain}") for domain in recipe.domains}}
    pieces = [
        scores_of(name, dense_piece, model=run.path(f"baselines/{name}"), **common)
        if row.trains
        else Piece.of(name, ensemble_piece, **trained, **held_arguments(run))
        for name, row in recipe.baselines.items()
    ]
    for name, piece in run.run(pieces, "evaluation").items():
        rows[name] = _baseline(run, name, piece.result)
    experts = {d: report["perplexity"][expert_row(d)][d] for d in recipe.domains}
    metrics = comparison_metrics(experts, rows)
    (run.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")


def ensemble_piece(
    *, out: Path, progress: Progress, experts: Mapping[str, Path], **common: Any
) -> Scores:
    """The piece: the experts' ensemble, nothing merged."""
    return evaluate_ensemble(experts, progress=progress, **common)


def _reported(run: StageRun, name: str, report: Mapping[str, Any]) -> Compared:
    """A row that the report has measured; nothing is trained for it after the experts."""
    model = run.path("model" if name in MERGED else f"experts/{next(iter(run.recipe.domains))}")
    counts = parameter_counts(model)
    return Compared(
        title=title_of(name, run.recipe.domains),
        perplexities=report["perplexity"][name],
        trained_parameters=0,
        active_parameters=counts.active,
        total_parameters=counts.total,
        tokens=0 if name == "seed" else expert_tokens(run.recipe),
    )


def _baseline(run: StageRun, name: str, scores: Scores) -> Compared:
    baseline = run.recipe.baselines[name]
    tokens = expert_tokens(run.recipe) if baseline.uses_experts else 0
    trained = 0
    if baseline.trains:
        summary = json.loads((run.path(f"baselines/{name}") / SUMMARY).read_text())
        counts = Counts(total=summary["total_parameters"], active=summary["active_parameters"])
        trained = summary["trained_parameters"]
        tokens = None if tokens is None else tokens + summary["tokens"]
    else:
        # Every token passes through every expert.
        each_one = [parameter_counts(run.path(f"experts/{d}")) for d in run.recipe.domains]
        counts = Counts(
            total=sum(counts.total for counts in each_one),
            active=sum(counts.active for counts in each_one),
        )
    return Compared(
        title=baseline.title or name,
        perplexities=perplexities(scores),
        trained_parameters=trained,
        active_parameters=counts.active,
        total_parameters=counts.total,
        tokens=tokens,
    )


def expert_tokens(recipe: Recipe) -> int | None:
    """Tokens that the experts were trained on; unknown where one is given, or continued."""
    return None if _unknown(recipe) else recipe.expert_tokens


def _unknown(recipe: Recipe) -> list[str]:
    """Domains of whose experts' training no record has all: given, or continued in some night."""
    domains = recipe.domains.items()
    return [n for n, domain in domains if domain.expert is not None or n in recipe.parents]


def row_costs(recipe: Recipe, workspace: Workspace, rows: Collection[str]) -> dict[str, Cost]:
    """{row: what was spent on it after the seed}; a row is absent if any part of it is unknown.

    Evaluation is left out: every row has the same. What given experts have cost is unknown.

    Args:
        recipe: What was made.
        workspace: Where.
        rows: Those that were scored.
    """
    stages = {name: labels for name, labels in _stages_behind(recipe).items() if name in rows}
    given = {f"experts@{domain}" for domain in _unknown(recipe)}
    found = {}
    for row_name, labels in stages.items():
        costs = [None if label in given else read_cost(workspace, label) for label in labels]
        known = [cost for cost in costs if cost is not None]
        if len(known) == len(costs):
            found[row_name] = Cost.together(known)
    return found


def _stages_behind(recipe: Recipe) -> dict[str, list[str]]:
    """{row: labels of the stages that made it, after the seed}"""
    experts, statistics, repaired = (
        [f"{stage}@{domain}" for domain in recipe.domains]
        for stage in ("experts", "statistics", "repaired")
    )
    begun = [*experts, "backbone", *(repaired if recipe.experts.repair != "none" else [])]
    solved = [*begun, *statistics, "router"]
    dume = [*solved, *([ROUTED] if repairs_routed(recipe) else []), "model"]
    # Whatever routers it is given: experts that are repaired for the solved ones hang on these.
    assembled = dume if repairs_routed(recipe) else [*begun, "model"]
    stages = {"seed": [], "model_averaging": experts, **dict.fromkeys(MERGED, assembled)}
    stages["dume"] = dume
    for name, row in recipe.baselines.items():
        before = dume if row.method == "dume" else experts if row.uses_experts else []
        stages[name] = [*before, f"baselines-{name}"] if row.trains else before
    return stages
