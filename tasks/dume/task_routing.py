"""Stage ``task_routing``: task scores of what DUME's routers are compared with, and of its choices.

The rows oracle, random routing and DUME OOD of the paper's Table 3, and the sweeps of its Figure 2.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.dume.checks import DUME, swept
from tasks.dume.files import ROUTERS, statistics_files
from tasks.dume.variants import Drawn, Saved, Swept
from tasks.engine.params import router_keys
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.dume.config import RouterConfig
from upcycle_core.evaluation.tasks.adapter import evaluate_tasks
from upcycle_core.evaluation.tasks.score import TaskScore
from upcycle_core.evaluation.text.pieces import Variant
from upcycle_core.evaluation.text.results import Parameter
from upcycle_core.progress import Progress

RANDOM, SCORES = "random_routing", "scores.json"
Scores = Mapping[str, TaskScore]
"""{task: score}"""
Scored = dict[str, Any]
"""The same in plain values."""


@dataclass(frozen=True)
class RoutingScores:
    """What the stage has measured.

    Args:
        rows: {row: {task: score}}; of random routing one value a draw and seed.
        sweeps: {parameter: {value: {task: score}}}
    """

    rows: Mapping[str, Scores] = field(default_factory=dict)
    sweeps: Mapping[Parameter, Mapping[float, Scores]] = field(default_factory=dict)


def routing_asked(recipe: Recipe) -> bool:
    """Whether there is anything to score beside the models."""
    if recipe.method != DUME or not recipe.tasks:
        return False
    return bool(recipe.task_evaluation.routing or any(swept(recipe).values()))


def _inputs(recipe: Recipe, item: str) -> list[str]:
    found = ["model", *(f"task_sets/{name}" for name in recipe.tasks)]
    sweeps = any(swept(recipe).values())
    if sweeps or "dume_ood" in recipe.task_evaluation.routing:
        found.append("router")
    if sweeps:
        found += each(recipe, "statistics/{domain}")
    return found


def _params(recipe: Recipe, item: str) -> Iterator[str]:
    yield from ("task_evaluation", "corpus.bos", "task_evaluation.routing")
    yield from (f"tasks.{name}.domain" for name in recipe.tasks)
    yield from (f"task_evaluation.sweep_{name}" for name in swept(recipe))
    if RANDOM in recipe.task_evaluation.routing:
        yield "evaluation.random_routing_seeds"
    if any(swept(recipe).values()):
        yield from router_keys(recipe)


@stage("task_routing", _inputs, params=_params, each=lambda r: [""] if routing_asked(r) else [])
def task_routing(run: StageRun) -> None:
    """Write ``scores.json``: rows, and points of sweeps."""
    recipe, chosen = run.recipe, run.recipe.task_evaluation.routing
    task_sets = {name: run.path(f"task_sets/{name}") for name in recipe.tasks}
    common = {
        "model": run.path("model"),
        "task_sets": task_sets,
        "config": recipe.task_evaluation.measuring,
        "bos": recipe.corpus.bos,
        "device": run.device("task_evaluation"),
    }
    pieces = []
    if "oracle" in chosen:
        place = {domain: index for index, domain in enumerate(recipe.domains)}
        own = {name: place[task.domain] for name, task in recipe.tasks.items() if task.domain}
        some = {name: task_sets[name] for name in own}
        arguments = {**common, "task_sets": some, "experts": own}
        pieces.append(_piece("oracle", oracle_piece, arguments, "experts"))
    if "dume_ood" in chosen:
        path = run.path("router") / ROUTERS["elsewhere"]
        pieces.append(_piece("dume_ood", routed_piece, {**common, "routers": path}))
    draws = recipe.evaluation.drawn_seeds(len(recipe.domains)) if RANDOM in chosen else ()
    drawing = {"experts": len(recipe.domains), **common}
    pieces += [_piece(f"{RANDOM}-{s}", random_piece, {**drawing, "seed": s}) for s in draws]
    points = {
        f"sweep_{parameter}-{value}": (parameter, value)
        for parameter, values in swept(recipe).items()
        for value in values
    }
    for name, (parameter, value) in points.items():
        solving = {
            "routers": run.path("router") / ROUTERS["calibration"],
            "statistics": statistics_files(run, "calibration"),
            "router": recipe.router,
        }
        point = {"parameter": parameter, "value": value, **solving}
        pieces.append(_piece(name, sweep_piece, {**common, **point}))
    found = {name: done.result for name, done in run.run(pieces, "task_evaluation").items()}
    rows: dict[str, Any] = {row: found[row] for row in chosen if row in found}
    if draws:
        rows[RANDOM] = _together([found[f"{RANDOM}-{seed}"] for seed in draws])
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for name, (parameter, value) in points.items():
        sweeps.setdefault(parameter, []).append({"value": value, "scores": found[name]})
    values = {"rows": rows, "sweeps": sweeps}
    (run.out / SCORES).write_text(json.dumps(values, indent=1) + "\n")


def _piece(
    name: str, function: Callable[..., Scored], arguments: Mapping[str, Any], *each_task: str
) -> Piece:
    """One row or point, every task apart: what is known of it is not asked again."""
    each = ("task_sets", *each_task)
    return Piece(name=name, function=function, arguments=arguments, each=each)


def read_routing_scores(directory: Path) -> RoutingScores:
    """What the stage wrote."""
    values = json.loads((directory / SCORES).read_text())
    return RoutingScores(
        rows={row: _scores(own) for row, own in values["rows"].items()},
        sweeps={
            parameter: {float(point["value"]): _scores(point["scores"]) for point in points}
            for parameter, points in values["sweeps"].items()
        },
    )


def oracle_piece(
    *, out: Path, progress: Progress, experts: Mapping[str, int], **common: Any
) -> Scored:
    """The piece: every task's tokens through the expert of its domain."""
    return _measured(Variant(), progress, experts=experts, **common)


def routed_piece(*, out: Path, progress: Progress, routers: Path, **common: Any) -> Scored:
    """The piece: the MoE with the routers of a file."""
    return _measured(Saved(routers).variant(common["model"]), progress, **common)


def random_piece(
    *, out: Path, progress: Progress, experts: int, seed: int, **common: Any
) -> Scored:
    """The piece: the MoE with routers that know nothing."""
    return _measured(Drawn(seed, experts).variant(common["model"]), progress, **common)


def sweep_piece(
    *,
    out: Path,
    progress: Progress,
    parameter: Parameter,
    value: float,
    routers: Path,
    statistics: Mapping[str, Path],
    router: RouterConfig,
    **common: Any,
) -> Scored:
    """The piece: the MoE with one parameter set to ``value``."""
    swept = Swept(
        parameter=parameter, value=value, routers=routers, statistics=statistics, router=router
    )
    return _measured(swept.variant(common["model"]), progress, **common)


def _measured(
    variant: Variant, progress: Progress, *, model: Path, task_sets: Mapping[str, Path], **how: Any
) -> Scored:
    scores, _ = evaluate_tasks(model, task_sets, variant=variant, progress=progress, **how)
    return {task: score.to_dict() for task, score in scores.items()}


def _together(draws: list[dict[str, Any]]) -> Scored:
    """Several draws' scores as one row: the values of all, and the rest of the first."""
    return {
        task: {**score, "values": [value for draw in draws for value in draw[task]["values"]]}
        for task, score in draws[0].items()
    }


def _scores(values: Mapping[str, Any]) -> dict[str, TaskScore]:
    return {task: TaskScore.from_dict(score) for task, score in values.items()}
