"""Stage ``report``: perplexity on held-out text of everything that belongs in the table."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.cluster.compute import Done, Piece
from infra.recipe.schema import Recipe
from tasks.dume.files import ROUTERS, splits, statistics_files
from tasks.engine.params import router_keys
from tasks.engine.stage import StageRun, each, stage
from tasks.scoring.evaluation import (
    ROWS,
    average_piece,
    dense_piece,
    heldout_arguments,
    oracle_piece,
    random_piece,
    routed_piece,
    sweep_piece,
)
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import Scores
from upcycle_core.evaluation.text.report import write_report
from upcycle_core.evaluation.text.results import Evaluation, Parameter, expert_row
from upcycle_core.evaluation.text.scores import Score

RANDOM = "random_routing"


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    patterns = ["experts/{domain}", "corpora/{domain}/heldout"]
    if any(_swept(recipe.evaluation).values()):
        patterns.append("statistics/{domain}")
    found = [name for pattern in patterns for name in each(recipe, pattern)]
    return [*found, "backbone", "router", "model", *(["seed"] if recipe.has_seed else [])]


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


@stage(
    "report",
    inputs=_inputs,
    params=_params,
)
def report(run: StageRun) -> None:
    """Write metrics.json, tables, pictures and the CSV behind them."""
    done = run.run([*_dense_pieces(run), *_moe_pieces(run)], "evaluation")
    evaluation = _collect(run.recipe, done)
    write_report(evaluation, run.out, model=run.recipe.name)


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
        *(
            Piece(
                name=f"{RANDOM}-{seed}",
                function=random_piece,
                arguments={"seed": seed, **common},
            )
            for seed in config.random_routing_seeds
        ),
    ]
    for parameter, value in _points(config):
        arguments = {
            "parameter": parameter,
            "value": value,
            "statistics": {split: statistics_files(run, split) for split in table},
            "router": run.recipe.router,
            **common,
        }
        name = _point(parameter, value)
        pieces.append(Piece(name=name, function=sweep_piece, arguments=arguments))
    return pieces


def _points(config: EvaluationConfig) -> list[tuple[Parameter, float]]:
    return [(parameter, value) for parameter, values in _swept(config).items() for value in values]


def _point(parameter: Parameter, value: float) -> str:
    """The piece that measures one point of a sweep."""
    return f"sweep_{parameter}-{value}"


def _collect(recipe: Recipe, done: Mapping[str, Done]) -> Evaluation:
    routed = done["routed"].result
    dense = {name: piece.result for name, piece in done.items() if name in _dense_names(recipe)}
    any_scores = next(iter(dense.values()))
    rows = {**dense, **{row: found["scores"] for row, found in routed.items()}}
    return Evaluation(
        domains=tuple(recipe.domains),
        perplexities={row: _perplexities(scores) for row, scores in rows.items()},
        repeats={
            RANDOM: [
                _perplexities(done[f"{RANDOM}-{seed}"].result["scores"])
                for seed in recipe.evaluation.random_routing_seeds
            ]
        },
        heldout={
            domain: {"tokens": score["tokens"], "bytes": score["bytes"]}
            for domain, score in any_scores.items()
        },
        routing=routed[ROWS["calibration"]]["routing"],
        sweeps=_sweeps(recipe, done),
    )


def _dense_names(recipe: Recipe) -> set[str]:
    return {"seed", "model_averaging", "oracle", *(expert_row(d) for d in recipe.domains)}


def _sweeps(
    recipe: Recipe, done: Mapping[str, Done]
) -> dict[Parameter, dict[str, dict[float, dict[str, float]]]]:
    """{parameter: {row: {value: perplexities}}}."""
    sweeps: dict[Parameter, dict[str, dict[float, dict[str, float]]]] = {}
    for parameter, value in _points(recipe.evaluation):
        for row, result in done[_point(parameter, value)].result.items():
            points = sweeps.setdefault(parameter, {}).setdefault(row, {})
            points[float(value)] = _perplexities(result["scores"])
    return sweeps


def _perplexities(scores: Scores) -> dict[str, float]:
    return {domain: Score.from_dict(score).perplexity for domain, score in scores.items()}
