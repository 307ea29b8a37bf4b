"""Stage ``report``: perplexity on held-out text of everything that belongs in the table."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.data.asked import say_lacking
from tasks.data.given import forms
from tasks.dume.files import ROUTERS, all_experts, joined_paths, splits, statistics_files
from tasks.dume.variants import Drawn, Saved, Swept, is_loaded_for_each, sweeps, variants_piece
from tasks.engine.params import router_keys
from tasks.engine.stage import StageRun, each, stage
from tasks.scoring.evaluation import (
    average_piece,
    counts,
    dense_piece,
    heldout_arguments,
    oracle_piece,
    perplexities,
    score_intervals,
    scores_of,
)
from upcycle_core.evaluation.text.pieces import Scores
from upcycle_core.evaluation.text.report import write_report
from upcycle_core.evaluation.text.results import Evaluation, Parameter, expert_row

RANDOM, AVERAGE, ORACLE, MOE = "random_routing", "model_averaging", "oracle", "moe"
ROWS = {"calibration": "dume", "elsewhere": "dume_ood"}


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    patterns = ["corpora/{domain}/heldout"]
    if any(sweeps(recipe.evaluation).values()):
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
    if any(sweeps(recipe.evaluation).values()):
        yield from router_keys(recipe)


@stage("report", _inputs, params=_params)
def report(run: StageRun) -> None:
    """Write metrics.json, tables, pictures and the CSV behind them."""
    heldout = {f"{d}/heldout": run.path(f"corpora/{d}/heldout") for d in run.recipe.domains}
    say_lacking(run, heldout, run.recipe.evaluation.tokens, key="evaluation.tokens")
    mixtures = _moe_pieces(run)  # first, as they take longest
    done = run.run([*mixtures, *_dense_pieces(run)], "evaluation")
    results = {name: piece.result for name, piece in done.items()}
    moe: dict[str, Any] = {}
    for piece in mixtures:
        moe |= results.pop(piece.name)
    evaluation = _collect(run.recipe, results, moe)
    write_report(evaluation, run.out, model=run.recipe.name, given=forms(run))


def _dense_pieces(run: StageRun) -> list[Piece]:
    """Every dense expert, the seed, the averaged model, and the oracle domain by domain."""
    common = heldout_arguments(run)
    experts = {domain: run.path(f"experts/{domain}") for domain in run.recipe.domains}
    joined, backbone = joined_paths(run), run.path("backbone")
    rows: list[Piece] = []
    for domain, texts in scored_on(run.recipe).items():
        some = {**common, "corpora": {text: common["corpora"][text] for text in texts}}
        rows.append(scores_of(expert_row(domain), dense_piece, model=experts[domain], **some))
    beside = run.recipe.evaluation.rows
    if run.recipe.has_seed and "seed" in beside:
        rows.append(scores_of("seed", dense_piece, model=run.path("seed"), **common))
    if AVERAGE in beside:
        rows.append(scores_of(AVERAGE, average_piece, experts=list(experts.values()), **common))
    if ORACLE in beside:
        piece = scores_of(ORACLE, oracle_piece, backbone=backbone, experts=joined, **common)
        rows.append(replace(piece, each=("corpora", "experts")))
    return rows


def scored_on(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """{domain: the domains whose text its expert is scored on}"""
    domains = tuple(recipe.domains)
    return {domain: recipe.evaluation.scored_on(domain, domains) for domain in domains}


def _moe_pieces(run: StageRun) -> list[Piece]:
    """The MoE with its routers, with random ones, and with each parameter swept.

    One piece, or one of each of these: see ``is_loaded_for_each``. Each has a name of its own, as
    another setting may say otherwise before what was killed goes on.
    """
    recipe, model = run.recipe, run.path("model")
    rows: dict[str, dict[str, Saved | Drawn | Swept]] = {}
    for split in splits(recipe):
        saved = Saved(run.path("router") / ROUTERS[split])
        rows.setdefault(f"{MOE}_routers", {})[ROWS[split]] = saved
    for name, seed in _draws(recipe).items():
        rows.setdefault(f"{MOE}_{RANDOM}", {})[name] = Drawn(seed, len(recipe.domains))
    for name, (split, parameter, value) in _points(recipe).items():
        rows.setdefault(f"{MOE}_{parameter}", {})[name] = Swept(
            parameter=parameter,
            value=value,
            routers=run.path("router") / ROUTERS[split],
            statistics=statistics_files(run, split),
            router=recipe.router,
        )
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    if not is_loaded_for_each(recipe.compute.evaluation, size):
        rows = {MOE: {name: own for part in rows.values() for name, own in part.items()}}
    common = {"model": model, **heldout_arguments(run)}
    pieces = [
        Piece(
            name=name,
            function=variants_piece,
            arguments={"variants": variants, **common},
            each=("variants",),
        )
        for name, variants in rows.items()
    ]
    return sorted(pieces, key=lambda piece: -len(piece.keys))


def _draws(recipe: Recipe) -> dict[str, int]:
    """{variant with random routers: their seed}; none where the row is not asked for."""
    if RANDOM not in recipe.evaluation.rows:
        return {}
    seeds = recipe.evaluation.drawn_seeds(len(recipe.domains))
    return {f"{RANDOM}-{seed}": seed for seed in seeds}


def _points(recipe: Recipe) -> dict[str, tuple[str, Parameter, float]]:
    """{variant that is a point of a sweep: calibration text, and the point}."""
    return {
        f"{ROWS[split]}-{parameter}-{value}": (split, parameter, value)
        for parameter, values in sweeps(recipe.evaluation).items()
        for value in values
        for split in splits(recipe)
    }


def _collect(recipe: Recipe, dense: Mapping[str, Scores], moe: Mapping[str, Any]) -> Evaluation:
    experts = {domain: dense[expert_row(domain)][domain] for domain in recipe.domains}
    random = [perplexities(moe[name]["scores"]) for name in _draws(recipe)]
    rows = {**dense, **{ROWS[split]: moe[ROWS[split]]["scores"] for split in splits(recipe)}}
    return Evaluation(
        domains=tuple(recipe.domains),
        perplexities={row: perplexities(scores) for row, scores in rows.items()},
        repeats={RANDOM: random} if random else {},
        heldout=counts(experts),
        routing=moe[ROWS["calibration"]]["routing"],
        sweeps=_sweeps(recipe, moe),
        intervals=score_intervals(rows, experts),
        scored_on={expert_row(d): texts for d, texts in scored_on(recipe).items()},
    )


def _sweeps(
    recipe: Recipe, moe: Mapping[str, Any]
) -> dict[Parameter, dict[str, dict[float, dict[str, float]]]]:
    """{parameter: {row: {value: perplexities}}}."""
    sweeps: dict[Parameter, dict[str, dict[float, dict[str, float]]]] = {}
    for name, (split, parameter, value) in _points(recipe).items():
        points = sweeps.setdefault(parameter, {}).setdefault(ROWS[split], {})
        points[float(value)] = perplexities(moe[name]["scores"])
    return sweeps
