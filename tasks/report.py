"""Stage ``report``: perplexity on held-out text of everything that belongs in the table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.compute import Done, Piece
from infra.recipe import Recipe
from tasks.evaluation import (
    ROWS,
    average_piece,
    dense_piece,
    oracle_piece,
    random_piece,
    routed_piece,
    sweep_piece,
)
from tasks.routers import ROUTERS, splits, statistics_files
from tasks.stage import StageRun, each, stage
from upcycle_core.evaluation.pieces import Scores
from upcycle_core.evaluation.report import write_report
from upcycle_core.evaluation.results import Evaluation, Parameter, expert_row
from upcycle_core.evaluation.scores import Score
from upcycle_core.evaluation.table import format_table

RANDOM = "random_routing"


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    patterns = ("experts/{domain}", "corpora/{domain}", "statistics/{domain}")
    found = [name for pattern in patterns for name in each(recipe, pattern)]
    return [*found, "backbone", "router", "model", *(["seed"] if recipe.has_seed else [])]


@stage(
    "report",
    inputs=_inputs,
    params=("evaluation", "router", "compute.evaluation", "backbone"),
    sources=(
        "tasks/evaluation.py",
        "tasks/report.py",
        "upcycle_core/backbone/stitch.py",
        "upcycle_core/corpora/batches.py",
        "upcycle_core/corpora/mixture.py",
        "upcycle_core/corpora/seeded.py",
        "upcycle_core/evaluation/canvas.py",
        "upcycle_core/evaluation/page.py",
        "upcycle_core/evaluation/perplexity.py",
        "upcycle_core/evaluation/pieces.py",
        "upcycle_core/evaluation/plots.py",
        "upcycle_core/evaluation/report.py",
        "upcycle_core/evaluation/results.py",
        "upcycle_core/evaluation/routing.py",
        "upcycle_core/evaluation/scores.py",
        "upcycle_core/evaluation/table.py",
        "upcycle_core/moe/inspect.py",
        "upcycle_core/moe/random.py",
    ),
    needed=lambda recipe: recipe.method == "dume",
)
def report(run: StageRun) -> None:
    """Write metrics.json, tables, pictures and the CSV behind them."""
    done = run.run([*_dense_pieces(run), *_moe_pieces(run)], "evaluation")
    evaluation = _collect(run.recipe, done)
    write_report(evaluation, run.out)
    (run.out / "table.txt").write_text(format_table(evaluation))


def _dense_pieces(run: StageRun) -> list[Piece]:
    """Every dense expert, the seed, the averaged model, and the oracle domain by domain."""
    domains = list(run.recipe.domains)
    common = heldout_arguments(run)
    pieces = [_dense(expert_row(d), run.path(f"experts/{d}"), common) for d in domains]
    if run.recipe.has_seed:
        pieces.append(_dense("seed", run.path("seed"), common))
    averaged = [run.path(f"experts/{d}") for d in domains]
    pieces.append(
        Piece(
            name="model_averaging",
            function=average_piece,
            arguments={"experts": averaged, **common},
        )
    )
    oracle = {"backbone": run.path("backbone"), **common}
    return [
        *pieces,
        Piece(
            name="oracle",
            function=oracle_piece,
            arguments={"experts": dict(zip(domains, averaged, strict=True)), **oracle},
        ),
    ]


def _dense(name: str, model: Path, common: Mapping[str, Any]) -> Piece:
    return Piece(name=name, function=dense_piece, arguments={"model": model, **common})


def _moe_pieces(run: StageRun) -> list[Piece]:
    """The MoE with its routers, with random ones, and with each parameter swept."""
    config = run.recipe.evaluation
    common = {"model": run.path("model"), **heldout_arguments(run)}
    table = {split: run.path("router") / ROUTERS[split] for split in splits(run.recipe)}
    pieces = [
        Piece(name="routed", function=routed_piece, arguments={"routers": table, **common}),
        Piece(
            name=RANDOM,
            function=random_piece,
            arguments={"seeds": config.random_routing_seeds, **common},
        ),
    ]
    sweeps: dict[Parameter, Sequence[float]] = {
        "top_k": config.sweep_top_k,
        "ridge_lambda": config.sweep_ridge_lambda,
        "window": config.sweep_window,
    }
    for parameter, values in sweeps.items():
        if not values:
            continue
        arguments = {
            "parameter": parameter,
            "values": values,
            "statistics": {split: statistics_files(run, split) for split in table},
            "router": run.recipe.router,
            **common,
        }
        pieces.append(Piece(name=f"sweep_{parameter}", function=sweep_piece, arguments=arguments))
    return pieces


def heldout_arguments(run: StageRun) -> dict[str, Any]:
    """What every piece that scores a model on the held-out text is given."""
    return {
        "corpora": {d: run.path(f"corpora/{d}/heldout") for d in run.recipe.domains},
        "config": run.recipe.evaluation,
        "device": run.device("evaluation"),
    }


def _collect(recipe: Recipe, done: Mapping[str, Done]) -> Evaluation:
    routed = done["routed"].result
    dense = {name: piece.result for name, piece in done.items() if name in _dense_names(recipe)}
    any_scores = next(iter(dense.values()))
    rows = {**dense, **{row: found["scores"] for row, found in routed.items()}}
    return Evaluation(
        domains=tuple(recipe.domains),
        perplexities={row: _perplexities(scores) for row, scores in rows.items()},
        repeats={
            RANDOM: [_perplexities(found["scores"]) for found in done[RANDOM].result.values()]
        },
        heldout={
            domain: {"tokens": score["tokens"], "bytes": score["bytes"]}
            for domain, score in any_scores.items()
        },
        routing=routed[ROWS["calibration"]]["routing"],
        sweeps=_sweeps(done),
    )


def _dense_names(recipe: Recipe) -> set[str]:
    return {"seed", "model_averaging", "oracle", *(expert_row(d) for d in recipe.domains)}


def _sweeps(done: Mapping[str, Done]) -> dict[Parameter, dict[str, dict[float, dict[str, float]]]]:
    found: dict[Parameter, dict[str, dict[float, dict[str, float]]]] = {}
    parameters: tuple[Parameter, ...] = ("top_k", "ridge_lambda", "window")
    for parameter in parameters:
        piece = done.get(f"sweep_{parameter}")
        for name, result in (piece.result if piece else {}).items():
            row, value = name.split()
            points = found.setdefault(parameter, {}).setdefault(row, {})
            points[float(value)] = _perplexities(result["scores"])
    return found


def _perplexities(scores: Scores) -> dict[str, float]:
    return {domain: Score.from_dict(score).perplexity for domain, score in scores.items()}
