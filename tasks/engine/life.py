"""How a method's models live on: what of them stays while parts of them come, leave and learn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from infra.recipe.schema import Recipe
from tasks.engine.stage import Stage
from tasks.engine.workspace import Workspace
from upcycle_core.baselines.config import Baseline
from upcycle_core.evaluation.text.results import expert_row

Value = TypeVar("Value")
EXPERTS = ("experts/", "repaired/")
"""Where experts lie, and what they were repaired into."""


def joined(workspace: Workspace) -> str:
    """The artifact that names the experts of the workspace's model among what it was made from.

    That is the model, or, where it was trained on, what its training began with.
    """
    inputs = workspace.inputs("model")
    starts = [name for name in inputs if experts_in(workspace.inputs(name))]
    return "model" if experts_in(inputs) or not starts else starts[0]


def modelled(workspace: Workspace) -> tuple[str, ...]:
    """Domains of the workspace's model, in its order; none before there is a whole one."""
    return experts_in(workspace.inputs(joined(workspace)))


def experts_in(inputs: Iterable[str]) -> tuple[str, ...]:
    """Domains whose experts, repaired or as they are, something was made from."""
    named = (name.partition("/")[2] for name in inputs if name.startswith(EXPERTS))
    return tuple(dict.fromkeys(named))


def without_domain(recipe: Recipe, domain: str) -> Recipe:
    """The recipe without a domain, and without its name wherever else the recipe has it.

    A task on its held-out text leaves with it; any other is scored on, and normalised no more.
    """
    tasks = {
        name: replace(task, domain=None) if task.domain == domain else task
        for name, task in recipe.tasks.items()
        if task.domain != domain or task.heldout is None
    }
    left = [f"perplexity.{domain}", *(f"task.{n}" for n in recipe.tasks if n not in tasks)]
    averaged, scored = recipe.backbone.experts, recipe.task_evaluation.models
    gate, weights = recipe.registry.gate, recipe.router.domain_weights
    gate = replace(gate, tolerances=without_names(gate.tolerances, *left))
    scored = scored and tuple(name for name in scored if name != expert_row(domain))
    averaged = averaged and tuple(name for name in averaged if name != domain)
    return replace(
        recipe,
        domains=without_names(recipe.domains, domain),
        backbone=replace(recipe.backbone, experts=averaged),
        router=replace(recipe.router, domain_weights=without_names(weights, domain)),
        baselines={name: _row_without(row, domain) for name, row in recipe.baselines.items()},
        tasks=tasks,
        task_evaluation=replace(recipe.task_evaluation, models=scored),
        registry=replace(recipe.registry, gate=gate),
    )


def _row_without(row: Baseline, domain: str) -> Baseline:
    weights = without_names(row.objective.domain_weights, domain)
    return replace(row, objective=replace(row.objective, domain_weights=weights))


def without_names(named: Mapping[str, Value], *left: str) -> dict[str, Value]:
    """What is named, but for what has one of the names that left."""
    return {name: value for name, value in named.items() if name not in left}


@dataclass(frozen=True, kw_only=True)
class Life:
    """What ``flows.grow``, ``flows.shrink`` and ``flows.retrain`` know of a method.

    Args:
        pinned: Artifacts that are built upon as they are, once there is a model.
        reads: Stages that read what is new, before it is known which experts learn from it.
        texts: What a domain's expert is trained on, below the workspace.
        part: What comes and leaves, for people.
        section: Where recipes name it.
        parts: What a recipe names there.
        modelled: What of it is in a workspace's model.
        without: The recipe without a part, and without its name elsewhere.
        anchor: The domain that the lineage is to keep as the one the others are brought to, of
            those of the model that is there; None where there is no such thing.
        settled: The recipe with what its lineage says in the place of defaults.
        averages: Whether there is an average of experts that stays, and ``--rebuild`` makes anew.
        came: What to say of a model with a new part.
        left: What to say of a model without the part.
        scores: What is shown before and after, from metrics.json and the method's name.
        measure: What that is.
        percent: Whether a change of it is shown in percent; else in points.
    """

    pinned: Callable[[Recipe], Sequence[str]]
    reads: tuple[Stage, ...]
    texts: Callable[[Recipe, str], Sequence[str]] = lambda recipe, domain: ()
    part: str = "domain"
    section: str = "domains"
    parts: Callable[[Recipe], Iterable[str]] = lambda recipe: recipe.domains
    modelled: Callable[[Workspace], tuple[str, ...]] = modelled
    without: Callable[[Recipe, str], Recipe] = without_domain
    anchor: Callable[[Recipe, Sequence[str]], str | None] = lambda recipe, known: None
    settled: Callable[[Recipe, Workspace], Recipe] = lambda recipe, workspace: recipe
    averages: bool = False
    came: Callable[[Recipe], str] = lambda recipe: ""
    left: Callable[[Recipe, str], str] = lambda recipe, part: ""
    scores: Callable[[Mapping[str, Any], str], Mapping[str, float]] = lambda metrics, method: (
        metrics["perplexity"][method]
    )
    measure: str = "perplexity on held-out text"
    percent: bool = True
