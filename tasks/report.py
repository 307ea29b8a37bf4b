"""Stage ``report``: perplexity on held-out text of everything that belongs in the table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.compute import Done, Piece
from infra.recipe import Recipe
from tasks.routers import ROUTERS, splits, statistics_files
from tasks.stage import StageRun, each, stage
from upcycle_core.backbone.average import write_average
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import vocabulary_fingerprint
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.router import load_routers, solve_routers
from upcycle_core.dume.statistics import Statistics
from upcycle_core.evaluation.config import EvaluationConfig
from upcycle_core.evaluation.pieces import (
    Scores,
    Variant,
    evaluate_checkpoint,
    evaluate_moe,
    evaluate_stitched,
    evaluate_text,
    random_routers,
)
from upcycle_core.evaluation.report import write_report
from upcycle_core.evaluation.results import Evaluation, Parameter, expert_row
from upcycle_core.evaluation.scores import Score, perplexity_per_reference_token
from upcycle_core.evaluation.table import format_table
from upcycle_core.progress import Progress

ROWS = {"calibration": "dume", "elsewhere": "dume_ood"}
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
        "tasks/report.py",
        "upcycle_core/backbone/stitch.py",
        "upcycle_core/corpora/batches.py",
        "upcycle_core/corpora/seeded.py",
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
    ),
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
    common = _common(run)
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
    common = {"model": run.path("model"), **_common(run)}
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


def _common(run: StageRun) -> dict[str, Any]:
    return {
        "corpora": {d: run.path(f"corpora/{d}/heldout") for d in run.recipe.domains},
        "config": run.recipe.evaluation,
        "device": run.device("evaluation"),
    }


def dense_piece(*, out: Path, progress: Progress, model: Path, **common: Any) -> Scores:
    """The piece: one dense checkpoint."""
    return evaluate_checkpoint(model, progress=progress, **common)


def average_piece(
    *, out: Path, progress: Progress, experts: Sequence[Path], **common: Any
) -> Scores:
    """The piece: the average of all experts' weights, MLPs included."""
    write_average([CheckpointReader(path) for path in experts], out, max_shard_bytes=10**9)
    return evaluate_checkpoint(out, progress=progress, **common)


def oracle_piece(
    *,
    out: Path,
    progress: Progress,
    backbone: Path,
    experts: Mapping[str, Path],
    corpora: Mapping[str, Path],
    config: EvaluationConfig,
    device: str,
) -> Scores:
    """The piece: every domain's tokens through its own expert."""
    scores: Scores = {}
    for domain, expert in experts.items():
        scores |= evaluate_stitched(
            backbone,
            expert,
            {domain: corpora[domain]},
            config=config,
            device=device,
            progress=progress,
        )
    return scores


def routed_piece(
    *, out: Path, progress: Progress, model: Path, routers: Mapping[str, Path], **common: Any
) -> dict[str, Any]:
    """The piece: the MoE with the router of each calibration text."""
    variants = {
        ROWS[split]: Variant(routers=load_routers(path).weights) for split, path in routers.items()
    }
    return evaluate_moe(model, variants, progress=progress, **common)


def random_piece(
    *, out: Path, progress: Progress, model: Path, seeds: Sequence[int], **common: Any
) -> dict[str, Any]:
    """The piece: the MoE with routers that know nothing."""
    shape = CheckpointReader(model).config
    draw = partial(
        random_routers,
        shape["num_hidden_layers"],
        shape["hidden_size"],
        len(common["corpora"]),
    )
    variants = {str(seed): Variant(routers=draw(seed=seed)) for seed in seeds}
    return evaluate_moe(model, variants, progress=progress, **common)


def sweep_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    parameter: Parameter,
    values: Sequence[float],
    statistics: Mapping[str, Mapping[str, Path]],
    router: RouterConfig,
    **common: Any,
) -> dict[str, Any]:
    """The piece: the MoE with one parameter set to each of ``values`` (the paper's Figure 2)."""
    variants = {}
    for split, files in statistics.items():
        loaded = {domain: Statistics.load(path) for domain, path in files.items()}
        for value in values:
            config, window, top_k = router, None, None
            if parameter == "ridge_lambda":
                config = replace(router, ridge_lambda=float(value))
            elif parameter == "window":
                window = int(value)
            else:
                top_k = int(value)
            solution = solve_routers(loaded, config=config, window=window)
            variants[f"{ROWS[split]} {value}"] = Variant(routers=solution.weights, top_k=top_k)
    return evaluate_moe(model, variants, progress=progress, **common)


def champion_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    tokenizer: Path,
    documents: Mapping[str, Path],
    corpora: Mapping[str, Path],
    config: EvaluationConfig,
    reference: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """The piece: another model's perplexity on this text, per token of this run's tokenizer."""
    if vocabulary_fingerprint(model) == vocabulary_fingerprint(tokenizer):
        heldout = {domain: path / "heldout" for domain, path in corpora.items()}
        scores = evaluate_checkpoint(model, heldout, config=config, progress=progress)
        return {domain: Score.from_dict(score).perplexity for domain, score in scores.items()}
    texts = {domain: path / "heldout.parquet" for domain, path in documents.items()}
    limits = {domain: values["bytes"] for domain, values in reference.items()}
    scores = evaluate_text(model, texts, config=config, max_bytes=limits, progress=progress)
    return {
        domain: perplexity_per_reference_token(
            Score.from_dict(score),
            Score(
                nll=0.0, tokens=int(reference[domain]["tokens"]), bytes=reference[domain]["bytes"]
            ),
        )
        for domain, score in scores.items()
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
