"""What is wrong across the fields of a recipe, where its method has a say in what they mean."""

from collections.abc import Iterator

from infra.recipe.checks import warmup_faults
from infra.recipe.resources import WorkerResources
from infra.recipe.schema import Recipe
from tasks.data.adapters import adapter_faults
from tasks.data.lengths import read_lengths
from tasks.engine.method import Method
from tasks.methods import ADDITIONS, METHODS, models_of, scored_models
from upcycle_core.baselines.checks import baseline_faults
from upcycle_core.errors import Fault
from upcycle_core.evaluation.text.results import TITLES, expert_row
from upcycle_core.training.checks import shape_faults, training_faults
from upcycle_core.training.config import TrainingConfig

RESERVED = (*TITLES, "champion")
"""Rows that mean the same in every table; the last is the version before, in that of tasks."""


def faults(recipe: Recipe) -> Iterator[Fault]:
    """What the methods, and what runs on their models, say against a recipe."""
    if recipe.method not in METHODS:
        yield Fault("method", recipe.method, f"no method; use one of {list(METHODS)}")
        return
    method = METHODS[recipe.method]
    for other in METHODS.values():
        asked = other.section is not None and getattr(recipe, other.section) is not None
        if asked and method.section is None:
            remedy = f"and there is a section `{other.section}`, of {other.name}: remove one"
            yield Fault("method", recipe.method, remedy)
    yield from method.checks(recipe)
    if method.section is not None and getattr(recipe, method.section) is None:
        return  # said just now, and what follows reads it
    for other in METHODS.values():
        if other is not method:
            yield from other.unused(recipe)
    for addition in ADDITIONS:
        yield from addition.checks(recipe)
    if len(recipe.domains) < 2 and not method.has_labels:
        remedy = f"{len(recipe.domains)} given; at least two are needed"
        yield Fault("domains", sorted(recipe.domains), remedy)
    yield from _training_faults(recipe, method)
    yield from _worker_faults(recipe)
    yield from _row_faults(recipe, method)
    yield from _gate_faults(recipe, method)


def _training_faults(recipe: Recipe, method: Method) -> Iterator[Fault]:
    """What would come up only after hours: the experts are trained long after the seed."""
    trained: dict[str, TrainingConfig] = {}
    if method.has_seed and recipe.trains_seed:
        trained["seed_model.training"] = recipe.seed_model.training
    elif recipe.seed_model.text is not None:
        yield Fault("seed_model.text", None, "no seed is trained here; remove it")
    if recipe.trains_experts:
        trained["experts.training"] = recipe.experts.training
        if recipe.experts.continued is not None:
            trained["experts.continued"] = recipe.experts.continued
    rows = {
        f"baselines.{name}.training": row.training
        for name, row in recipe.baselines.items()
        if row.trains
    }
    for where, config in trained.items():
        if config.evaluation_steps is not None:
            remedy = "is for baselines; seed and experts are trained to their last step: remove it"
            yield Fault(f"{where}.evaluation_steps", config.evaluation_steps, remedy)
    for where, config in {**trained, **rows}.items():
        yield from training_faults(config, where)
    # A budget sets the rows' steps, and has judged them.
    for where, config in {**trained, **({} if recipe.comparison.tokens else rows)}.items():
        yield from warmup_faults(where, config)
    if method.trains_shape(recipe):
        yield from adapter_faults(recipe)
        yield from shape_faults(recipe.seed_model.shape, "seed_model.shape")
        longest = recipe.seed_model.shape.max_positions
        lengths = read_lengths(recipe, method.lengths(recipe))
        for where, length in lengths.items():
            if length > longest:
                remedy = f"longer than seed_model.shape.max_positions = {longest}; shorten it or "
                yield Fault(f"{where}.sequence_length", length, f"{remedy}raise that")


def _worker_faults(recipe: Recipe) -> Iterator[Fault]:
    """Batches that the workers cannot share, and workers that have nothing to share."""
    compute, experts = recipe.compute, recipe.experts
    trained = (
        {"seed": {"seed_model.training": recipe.seed_model.training}}
        if (recipe.trains_seed)
        else {}
    )
    if recipe.trains_experts:
        trained["experts"] = {"experts.training": experts.training}
        if experts.continued is not None:
            trained["experts"]["experts.continued"] = experts.continued
    for kind, configs in trained.items():
        workers = getattr(compute, kind).workers
        for where, config in configs.items():
            if config.gradient_accumulation % workers:
                remedy = f"must be a multiple of compute.{kind}.workers = {workers}"
                value = config.gradient_accumulation
                yield Fault(f"{where}.gradient_accumulation", value, remedy)
    for kind in ("seed", "experts", "post_training", "baselines"):
        resources: WorkerResources = getattr(compute, kind)
        if resources.sharding == "full" and resources.workers == 1:
            remedy = "one worker has nothing to share its weights with; use none, or set "
            remedy += f"compute.{kind}.workers to 2 or more"
            yield Fault(f"compute.{kind}.sharding", "full", remedy)
        if resources.placement == "spread" and resources.workers == 1:
            remedy = "one worker is on one machine; remove it, or set "
            remedy += f"compute.{kind}.workers to 2 or more"
            yield Fault(f"compute.{kind}.placement", resources.placement, remedy)


def _row_faults(recipe: Recipe, method: Method) -> Iterator[Fault]:
    """Rows that the recipe's models are compared with, or scored as."""
    without = [d for d, domain in recipe.domains.items() if domain.train is None]
    for name, row in recipe.baselines.items():
        where = f"baselines.{name}"
        # Labels stand in files that have not been read.
        labels = [""] * row.top_k if method.has_labels else list(recipe.domains)
        weighted = f"{where}.objective.domain_weights"
        for fault in baseline_faults(row, labels, where, normalise=recipe.moe.normalise_top_k):
            if not (method.has_labels and fault.field == weighted):
                yield fault
        if method.has_seed and row.uses_seed and not recipe.has_seed:
            remedy = "begins with the seed, and the recipe has none; give seed_model.model"
            yield Fault(f"{where}.method", row.method, remedy)
        family = recipe.seed_model.shape.family
        if row.method == "bam" and method.trains_shape(recipe) and family != "llama":
            remedy = f"has no stock attention to build on for {family}; remove the row"
            yield Fault(f"{where}.method", row.method, remedy)
        if row.trains and without and not method.has_labels:
            remedy = f"is trained on all domains, and {without} have no training text"
            yield Fault(f"{where}.method", row.method, remedy)
        accumulated, workers = row.training.gradient_accumulation, recipe.compute.baselines.workers
        if row.trains and accumulated % workers:
            remedy = f"must be a multiple of compute.baselines.workers = {workers}"
            yield Fault(f"{where}.training.gradient_accumulation", accumulated, remedy)
        if name in {*method.models(recipe), *RESERVED}:
            yield Fault(where, name, "names a row of the report already; rename it")
    known = list(models_of(recipe))
    for model in recipe.task_evaluation.models or ():
        if model not in known:
            remedy = f"not a model of this recipe; use some of {known}"
            yield Fault("task_evaluation.models", model, remedy)


def _gate_faults(recipe: Recipe, method: Method) -> Iterator[Fault]:
    gate, scored = recipe.registry.gate, scored_models(recipe)
    for metric, points in gate.tolerances.items():
        if points < 0:
            yield Fault(f"registry.gate.tolerances.{metric}", points, "must not be negative")
    on_text = method.figures(recipe)
    known = [*on_text, *(f"task.{name}" for name in recipe.tasks)]
    if any(task.domain is not None for task in recipe.tasks.values()):
        known.append("task_average")
    for metric in gate.metrics:
        where = "metric" if metric == gate.metric else "tolerances"
        if metric not in known:
            yield Fault(f"registry.gate.{where}", metric, f"not measured; use one of {known}")
        elif metric not in on_text:
            needed = [recipe.method, *_normalising(recipe, metric)]
            missing = [model for model in needed if model not in scored]
            if missing:
                remedy = f"the gate's {metric} needs {missing} as well; add them"
                yield Fault("task_evaluation.models", list(scored), remedy)


def _normalising(recipe: Recipe, metric: str) -> list[str]:
    """The experts whose scores a task figure is divided by."""
    if metric != "task_average":
        return []
    domains = {task.domain for task in recipe.tasks.values() if task.domain is not None}
    return [expert_row(domain) for domain in sorted(domains)]
