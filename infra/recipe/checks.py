"""What is wrong across the fields of a recipe, found without reading any file."""

from collections.abc import Iterator, Sequence

from infra.recipe.names import (
    BESIDE_DOMAINS,
    BESIDE_WORKSPACES,
    model_name_fault,
    name_fault,
    remote_fault,
    secret_faults,
)
from infra.recipe.schema import Recipe, resolve
from upcycle_core.baselines.checks import baseline_faults
from upcycle_core.config import SEEDS
from upcycle_core.corpora.config import Source
from upcycle_core.errors import Fault
from upcycle_core.evaluation.tasks.config import KINDS
from upcycle_core.training.checks import shape_faults, training_faults, weight_faults
from upcycle_core.training.config import TrainingConfig

ON_THE_CPU = ("corpora", "assembly")
"""Kinds of work that no GPU does."""
TEXT_METRICS = ("normalised_average", "normalised_worst")
"""Figures of the gate that every run measures."""


def faults(recipe: Recipe) -> list[Fault]:
    """Every fault that is no method's own."""
    return [
        *_name_faults(recipe),
        *_domain_faults(recipe),
        *_router_faults(recipe),
        *_evaluation_faults(recipe),
        *_bound_faults(recipe),
        *_training_faults(recipe),
        *_comparison_faults(recipe),
        *_task_faults(recipe),
        *_compute_faults(recipe),
    ]


def _name_faults(recipe: Recipe) -> Iterator[Fault]:
    """What would reach a folder, a shell, a URL or a query; secrets, which would be recorded."""
    yield from name_fault("name", recipe.name, BESIDE_WORKSPACES)
    for name in recipe.domains:
        yield from name_fault(f"domains.{name}", name, BESIDE_DOMAINS)
    codecs = {} if recipe.compression is None else recipe.compression.codecs
    sections = {
        "baselines": recipe.baselines,
        "tasks": recipe.tasks,
        "outside": recipe.outside,
        "compression.codecs": codecs,
    }
    for section, names in sections.items():
        for name in names:
            yield from name_fault(f"{section}.{name}", name)
    if recipe.registry.model is not None:
        yield from model_name_fault("registry.model", recipe.registry.model)
    if recipe.versions.remote is not None:
        yield from remote_fault("versions.remote", recipe.versions.remote)
    yield from secret_faults(resolve(recipe))


def _domain_faults(recipe: Recipe) -> Iterator[Fault]:
    count = len(recipe.domains)
    if count < 2 and recipe.simoe is None:
        yield Fault("domains", sorted(recipe.domains), f"{count} given; at least two are needed")
    for name, domain in recipe.domains.items():
        where = f"domains.{name}"
        if domain.train is None:
            missing = [
                part
                for part in ("expert", "calibration", "heldout")
                if getattr(domain, part) is None
            ]
            if missing:
                yield Fault(
                    f"{where}.train",
                    None,
                    f"no training text, and no {', '.join(missing)}; give one or the other",
                )
        for part in ("train", "calibration", "heldout", "elsewhere"):
            source = getattr(domain, part)
            if source is not None:
                yield from _source_faults(source, f"{where}.{part}", recipe.folder)
    for name, source in recipe.outside.items():
        yield from _source_faults(source, f"outside.{name}", recipe.folder)
    for name in recipe.backbone.experts or ():
        if name not in recipe.domains:
            yield Fault(
                "backbone.experts", name, f"not a domain; the domains are {list(recipe.domains)}"
            )


def _source_faults(source: Source, where: str, folder: str | None) -> Iterator[Fault]:
    given = [part for part in ("harvest", "files", "dataset") if getattr(source, part)]
    if len(given) != 1:
        yield Fault(where, given, "give exactly one of harvest, files and dataset")
    if folder is None and any("{folder}" in part for part in (*source.files, source.dataset or "")):
        yield Fault("folder", None, f"{where} needs it; add --set folder=PATH")


def _router_faults(recipe: Recipe) -> Iterator[Fault]:
    domains = len(recipe.domains)
    for where, k in [
        ("moe.top_k", recipe.moe.top_k),
        *(("evaluation.sweep_top_k", k) for k in recipe.evaluation.sweep_top_k),
    ]:
        if k > domains >= 2:
            yield Fault(where, k, f"more than the {domains} experts; use 1 to {domains}")
    ridge_lambda = recipe.router.ridge_lambda
    if isinstance(ridge_lambda, float) and ridge_lambda < 0:
        yield Fault("router.ridge_lambda", ridge_lambda, "must not be negative; use e.g. 0.01")
    for name in recipe.router.domain_weights:
        if name not in recipe.domains:
            yield Fault(
                "router.domain_weights",
                name,
                f"not a domain; the domains are {list(recipe.domains)}",
            )
    weights = recipe.router.domain_weights
    yield from weight_faults(weights, recipe.domains, "router.domain_weights")


def _bound_faults(recipe: Recipe) -> Iterator[Fault]:
    """Numbers in lists, which the bounds of their fields do not reach."""
    evaluation = recipe.evaluation
    least: dict[str, tuple[Sequence[float], int]] = {
        "statistics.position_buckets": (recipe.statistics.position_buckets, 1),
        "router.lambda_grid": (recipe.router.lambda_grid, 0),
        "evaluation.sweep_top_k": (evaluation.sweep_top_k, 1),
        "evaluation.sweep_ridge_lambda": (evaluation.sweep_ridge_lambda, 0),
    }
    for where, (values, bound) in least.items():
        for value in (value for value in values if value < bound):
            yield Fault(where, value, f"use {bound} or more")
    seeds = {
        "evaluation.random_routing_seeds": evaluation.random_routing_seeds,
        "task_evaluation.seeds": recipe.task_evaluation.seeds,
    }
    for where, chosen in seeds.items():
        if not chosen:
            yield Fault(where, [], "no run at all; give at least one seed")
        for seed in (seed for seed in chosen if not 0 <= seed < SEEDS):
            yield Fault(where, seed, f"use 0 to {SEEDS - 1}")
    if recipe.router.ridge_lambda == "cross-validate" and not recipe.router.lambda_grid:
        yield Fault("router.lambda_grid", [], "nothing to choose from; give at least one lambda")


def _evaluation_faults(recipe: Recipe) -> Iterator[Fault]:
    buckets = recipe.statistics.position_buckets
    if list(buckets) != sorted(set(buckets)):
        yield Fault("statistics.position_buckets", list(buckets), "must ascend; sort them")
    for window in recipe.evaluation.sweep_window:
        if window not in buckets:
            yield Fault(
                "evaluation.sweep_window",
                window,
                f"its statistics are not kept; use one of {list(buckets)} or add it to "
                "statistics.position_buckets",
            )


def _training_faults(recipe: Recipe) -> Iterator[Fault]:
    """What would come up only after hours: the experts are trained long after the seed."""
    trained: dict[str, TrainingConfig] = {}
    if recipe.trains_seed:
        trained["seed_model.training"] = recipe.seed_model.training
    if recipe.trains_shape:
        yield from shape_faults(recipe.seed_model.shape, "seed_model.shape")
        yield from _length_faults(recipe)
    if recipe.trains_experts:
        trained["experts.training"] = recipe.experts.training
    for where, config in trained.items():
        if config.evaluation_steps is not None:
            remedy = "is for baselines; seed and experts are trained to their last step: remove it"
            yield Fault(f"{where}.evaluation_steps", config.evaluation_steps, remedy)
    rows = {
        f"baselines.{name}.training": row.training
        for name, row in recipe.baselines.items()
        if row.trains
    }
    for where, config in {**trained, **rows}.items():
        yield from training_faults(config, where)
    # A budget sets the rows' steps, and has judged them.
    for where, config in {**trained, **({} if recipe.comparison.tokens else rows)}.items():
        if config.warmup_steps >= config.steps:
            yield Fault(
                f"{where}.warmup_steps",
                config.warmup_steps,
                f"the peak learning rate is never reached; use less than steps = {config.steps}",
            )


def _length_faults(recipe: Recipe) -> Iterator[Fault]:
    longest = recipe.seed_model.shape.max_positions
    lengths = {}
    if recipe.simoe is None or any(row.method == "btx" for row in recipe.baselines.values()):
        lengths["experts.training"] = recipe.experts.training.sequence_length
    if recipe.simoe is None:
        lengths["evaluation"] = recipe.evaluation.sequence_length
    if recipe.symphony is None:
        lengths["seed_model.training"] = recipe.seed_model.training.sequence_length
    else:
        lengths["symphony.calibration"] = recipe.symphony.calibration.sequence_length
    solves = recipe.symphony is None or recipe.symphony.router == "ridge"
    if recipe.simoe is None and solves:
        lengths["statistics"] = recipe.statistics.sequence_length
    if recipe.post_training is not None:
        lengths["post_training.training"] = recipe.post_training.training.sequence_length
    for name, row in recipe.baselines.items():
        if row.trains:
            lengths[f"baselines.{name}.training"] = row.training.sequence_length
    for where, length in lengths.items():
        if length > longest:
            yield Fault(
                f"{where}.sequence_length",
                length,
                f"longer than seed_model.shape.max_positions = {longest}; shorten it or raise that",
            )


def _comparison_faults(recipe: Recipe) -> Iterator[Fault]:
    for name, row in recipe.baselines.items():
        where = f"baselines.{name}"
        # With instructions, domains are labels in files that have not been read.
        labels = list(recipe.domains) if recipe.simoe is None else [""] * row.top_k
        found = baseline_faults(row, labels, where)
        weighted = f"{where}.objective.domain_weights"
        yield from (f for f in found if recipe.simoe is None or f.field != weighted)
        if recipe.symphony is None and row.uses_seed and not recipe.has_seed:
            remedy = "begins with the seed, and the recipe has none; give seed_model.model"
            yield Fault(f"{where}.method", row.method, remedy)
        without = [d for d, domain in recipe.domains.items() if domain.train is None]
        if row.trains and without and recipe.simoe is None:
            remedy = f"is trained on all domains, and {without} have no training text"
            yield Fault(f"{where}.method", row.method, remedy)
        accumulated, workers = row.training.gradient_accumulation, recipe.compute.baselines.workers
        if row.trains and accumulated % workers:
            remedy = f"must be a multiple of compute.baselines.workers = {workers}"
            yield Fault(f"{where}.training.gradient_accumulation", accumulated, remedy)


def _task_faults(recipe: Recipe) -> Iterator[Fault]:
    for name, task in recipe.tasks.items():
        where = f"tasks.{name}"
        given = [kind for kind in KINDS if getattr(task, kind) is not None]
        if len(given) != 1:
            yield Fault(where, given, f"give exactly one of {', '.join(KINDS)}")
        if task.heldout is not None and task.domain is None:
            remedy = f"name the domain whose held-out text is read: one of {list(recipe.domains)}"
            yield Fault(f"{where}.domain", None, remedy)
        if task.domain is not None and task.domain not in recipe.domains:
            remedy = f"not a domain; the domains are {list(recipe.domains)}"
            yield Fault(f"{where}.domain", task.domain, remedy)
    for model in recipe.task_evaluation.models or ():
        if model not in recipe.models:
            remedy = f"not a model of this recipe; use some of {list(recipe.models)}"
            yield Fault("task_evaluation.models", model, remedy)


def text_figures(recipe: Recipe) -> list[str]:
    """Figures that a report of perplexity on held-out text holds."""
    return [*TEXT_METRICS, *(f"perplexity.{name}" for name in recipe.domains)]


def _compute_faults(recipe: Recipe) -> Iterator[Fault]:
    """What would be reserved and stay idle."""
    for kind in ON_THE_CPU:
        gpus = getattr(recipe.compute, kind).gpus
        if gpus > 0:
            yield Fault(f"compute.{kind}.gpus", gpus, "computes on the CPU alone; remove it")
