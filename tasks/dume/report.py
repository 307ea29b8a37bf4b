"""Stage ``report``: perplexity on held-out text of everything that belongs in the table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.data.asked import say_lacking
from tasks.data.given import forms
from tasks.dume.files import ROUTERS, all_experts, joined_paths, splits, statistics_files
from tasks.engine.params import router_keys
from tasks.engine.stage import StageRun, each, stage
from tasks.scoring.evaluation import (
    ROWS,
    average_piece,
    counts,
    dense_piece,
    heldout_arguments,
    oracle_piece,
    perplexities,
    random_piece,
    routed_piece,
    score_intervals,
    scores_of,
    sweep_piece,
)
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import Scores
from upcycle_core.evaluation.text.report import write_report
from upcycle_core.evaluation.text.results import Evaluation, Parameter, expert_row

RANDOM = "random_routing"


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    patterns = ["corpora/{domain}/heldout"]
    if any(_swept(recipe.evaluation).values()):
        patterns.append("statistics/{domain}")
    found = [name for pattern in patterns for name in each(recipe, pattern)]
    return [
        *all_experts(recipe),
        *found,
        "backbone",
        "router",
        "model",
        *(["seed"] if recipe.has_seed else []),
    ]


def _params(recipe: Recipe, item: str) -> Iterator[str]:
    yield from ("name", "evaluation")
    if any(_swept(recipe.evaluation).values()):
        yield from router_keys(recipe)


def _swept(config: EvaluationConfig) -> dict[Parameter, Sequence[float]]:
    """The values of each parameter that is swept."""
    return {
        "top_k": config.sweep_top_k,
        "ridge_lambda": config.sweep_ridge_lambda,
        "window": config.sweep_window,
    }


@stage("report", _inputs, params=_params)
def report(run: StageRun) -> None:
    """Write metrics.json, tables, pictures and the CSV behind them."""
    heldout = {f"{d}/heldout": run.path(f"corpora/{d}/heldout") for d in run.recipe.domains}
    say_lacking(run, heldout, run.recipe.evaluation.tokens, key="evaluation.tokens")
    dense = _dense_pieces(run)
    done = run.run([*dense, *_moe_pieces(run)], "evaluation")
    results = {name: piece.result for name, piece in done.items()}
    evaluation = _collect(run.recipe, {piece.name: results[piece.name] for piece in dense}, results)
    write_report(evaluation, run.out, model=run.recipe.name, given=forms(run))


def _dense_pieces(run: StageRun) -> list[Piece]:
    """Every dense expert, the seed, the averaged model, and the oracle domain by domain."""
    common = heldout_arguments(run)
    experts = {domain: run.path(f"experts/{domain}") for domain in run.recipe.domains}
    joined, backbone = joined_paths(run), run.path("backbone")
    models = {expert_row(domain): path for domain, path in experts.items()}
    if run.recipe.has_seed:
        models["seed"] = run.path("seed")
    return [
        *(scores_of(row, dense_piece, model=path, **common) for row, path in models.items()),
        scores_of("model_averaging", average_piece, experts=list(experts.values()), **common),
        replace(
            scores_of("oracle", oracle_piece, backbone=backbone, experts=joined, **common),
            each=("corpora", "experts"),
        ),
    ]


def _moe_pieces(run: StageRun) -> list[Piece]:
    """The MoE with its routers, with random ones, and with each parameter swept."""
    config = run.recipe.evaluation
    common = {"model": run.path("model"), **heldout_arguments(run)}
    table = {split: run.path("router") / ROUTERS[split] for split in splits(run.recipe)}
    pieces = [Piece.of("routed", routed_piece, routers=table, **common)]
    for seed in config.random_routing_seeds:
        pieces.append(Piece.of(f"{RANDOM}-{seed}", random_piece, seed=seed, **common))
    for name, (parameter, value) in _points(config).items():
        solving = {
            "statistics": {split: statistics_files(run, split) for split in table},
            "router": run.recipe.router,
        }
        point = {"parameter": parameter, "value": value, **solving}
        pieces.append(Piece.of(name, sweep_piece, **point, **common))
    return pieces


def _points(config: EvaluationConfig) -> dict[str, tuple[Parameter, float]]:
    """{the piece that measures a point of a sweep: that point}."""
    return {
        f"sweep_{parameter}-{value}": (parameter, value)
        for parameter, values in _swept(config).items()
        for value in values
    }


def _collect(recipe: Recipe, dense: Mapping[str, Scores], results: Mapping[str, Any]) -> Evaluation:
    routed = results["routed"]
    rows = {**dense, **{row: found["scores"] for row, found in routed.items()}}
    drawn = [results[f"{RANDOM}-{seed}"] for seed in recipe.evaluation.random_routing_seeds]
    return Evaluation(
        domains=tuple(recipe.domains),
        perplexities={row: perplexities(scores) for row, scores in rows.items()},
        repeats={RANDOM: [perplexities(found["scores"]) for found in drawn]},
        heldout=counts(next(iter(dense.values()))),
        routing=routed[ROWS["calibration"]]["routing"],
        sweeps=_sweeps(recipe, results),
        intervals=score_intervals(rows, {d: dense[expert_row(d)][d] for d in recipe.domains}),
    )


def _sweeps(
    recipe: Recipe, results: Mapping[str, Any]
) -> dict[Parameter, dict[str, dict[float, dict[str, float]]]]:
    """{parameter: {row: {value: perplexities}}}."""
    sweeps: dict[Parameter, dict[str, dict[float, dict[str, float]]]] = {}
    for name, (parameter, value) in _points(recipe.evaluation).items():
        for row, found in results[name].items():
            points = sweeps.setdefault(parameter, {}).setdefault(row, {})
            points[float(value)] = perplexities(found["scores"])
    return sweeps
