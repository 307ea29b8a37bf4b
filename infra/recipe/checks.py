"""What is wrong across the fields of a recipe, found without reading any file."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import product
from math import ceil

from infra.recipe.names import (
    BESIDE_DOMAINS,
    BESIDE_WORKSPACES,
    model_name_fault,
    name_fault,
    remote_fault,
    secret_faults,
)
from infra.recipe.paths import FOLDER
from infra.recipe.resources import Resources, WorkerResources
from infra.recipe.schema import Recipe, resolve
from upcycle_core.config import SEEDS, Counted
from upcycle_core.corpora.config import Source
from upcycle_core.errors import Fault
from upcycle_core.evaluation.tasks.config import KINDS
from upcycle_core.training.config import TrainingConfig

SHOWN = 3
ON_THE_CPU = ("corpora", "assembly")
"""Kinds of work that no GPU does."""
OWN_KEYS = {
    "CPU": "cpus",
    "GPU": "gpus",
    "memory": "memory",
    "object_store_memory": "memory",
    "accelerator_type": "accelerator",
}
"""What Ray calls the resources that have keys of their own."""
LEAST_MEMORY = 10**6
"""Bytes that a piece can reserve; who says less has left the unit out."""
CALIBRATION = ("calibration", "elsewhere")
"""Texts that statistics are gathered on."""
LEARNT = (".train", ".text")
"""How the fields of texts end that are learnt from."""
ON_FINISHED = ("statistics.count", "evaluation.loss")
"""Settings that count tokens and train nothing."""


def faults(recipe: Recipe) -> list[Fault]:
    """Every fault that is no method's own."""
    return [
        *_name_faults(recipe),
        *_domain_faults(recipe),
        *_router_faults(recipe),
        *_evaluation_faults(recipe),
        *_bound_faults(recipe),
        *_response_faults(recipe),
        *_task_faults(recipe),
        *_compute_faults(recipe),
    ]


def domain_faults(where: str, names: Iterable[str], recipe: Recipe) -> Iterator[Fault]:
    """Names, given at ``where``, that are no domains of the recipe."""
    for name in names:
        if name not in recipe.domains:
            remedy = f"not a domain; the domains are {list(recipe.domains)}"
            yield Fault(where, name, remedy)


def warmup_faults(where: str, config: TrainingConfig) -> Iterator[Fault]:
    """A warm-up, of what is trained at ``where``, that does not end."""
    if config.warmup_steps >= config.steps:
        remedy = f"the peak learning rate is never reached; use less than steps = {config.steps}"
        yield Fault(f"{where}.warmup_steps", config.warmup_steps, remedy)


def _name_faults(recipe: Recipe) -> Iterator[Fault]:
    """What would reach a folder, a shell, a URL or a query; secrets, which would be recorded."""
    yield from name_fault("name", recipe.name, BESIDE_WORKSPACES)
    for name in recipe.domains:
        yield from name_fault(f"domains.{name}", name, BESIDE_DOMAINS)
    sections = {
        "baselines": recipe.baselines,
        "tasks": recipe.tasks,
        "outside": recipe.outside,
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
    for name, domain in recipe.domains.items():
        where = f"domains.{name}"
        if domain.train is None:
            needed = ("expert", "calibration", "heldout")
            missing = [part for part in needed if getattr(domain, part) is None]
            if missing:
                remedy = f"no training text, and no {', '.join(missing)}; give one or the other"
                yield Fault(f"{where}.train", None, remedy)
        for part in ("train", "calibration", "heldout", "elsewhere"):
            source = getattr(domain, part)
            if source is not None:
                yield from source.faults(f"{where}.{part}")
    for name, source in recipe.outside.items():
        yield from source.faults(f"outside.{name}")
    if recipe.seed_model.text is not None:
        yield from recipe.seed_model.text.faults("seed_model.text")
    if needing := sorted(_needing_folder(recipe)):
        needs = "needs" if len(needing) == 1 else "need"
        said = f"{', '.join(needing[:SHOWN])}{' and more' * (len(needing) > SHOWN)} {needs} it"
        yield Fault("folder", None, f"{said}; add --set folder=PATH")
    yield from domain_faults("backbone.experts", recipe.backbone.experts or (), recipe)


def _needing_folder(recipe: Recipe) -> Iterator[str]:
    """Models and texts that are named by a folder which the recipe does not name; models that
    were named by one have been filled in."""
    models = {"seed_model.model": recipe.seed_model.model}
    sources: dict[str, Source | None] = {f"outside.{name}": s for name, s in recipe.outside.items()}
    sources["seed_model.text"] = recipe.seed_model.text
    for name, domain in recipe.domains.items():
        where = f"domains.{name}"
        models[f"{where}.expert"] = domain.expert
        models[f"{where}.origin.model"] = domain.origin.model if domain.origin else None
        texts = ("train", "calibration", "heldout", "elsewhere")
        sources |= {f"{where}.{part}": getattr(domain, part) for part in texts}
    yield from (where for where, model in models.items() if model and FOLDER in model)
    if recipe.folder is None:
        for where, source in sources.items():
            parts = [] if source is None else [*source.files, source.dataset or ""]
            if any(FOLDER in part for part in parts):
                yield where


def responses_asked(recipe: Recipe) -> Iterator[tuple[str, str, Source]]:
    """Each setting that counts responses alone, with each text that it counts them in."""
    return _counting(recipe, "responses")


def learnt_whole(recipe: Recipe) -> dict[str, str]:
    """Each text that a training learns all of, with the setting that says so."""
    return {
        text: setting
        for setting, text, _ in _counting(recipe, "all")
        if setting not in ON_FINISHED and text.endswith(LEARNT)
    }


def _counting(recipe: Recipe, wanted: Counted) -> Iterator[tuple[str, str, Source]]:
    """Each setting that counts the ``wanted`` tokens, with each text that it counts them in."""
    everyone = tuple(recipe.domains)
    untrained = tuple(name for name in everyone if recipe.domains[name].expert is None)
    counts: dict[str, tuple[Counted, Sequence[str], Sequence[str]]] = {
        "statistics.count": (recipe.statistics.count, everyone, CALIBRATION),
        "evaluation.loss": (recipe.evaluation.loss, everyone, ("heldout",)),
        "experts.training.loss": (recipe.experts.training.loss, untrained, ("train",)),
        "experts.continued.loss": (recipe.experts.continuing.loss, untrained, ("train",)),
    }
    rows = {
        f"baselines.{name}.training": row.training
        for name, row in recipe.baselines.items()
        if row.trains
    }
    if recipe.post_training is not None:
        rows["post_training.training"] = recipe.post_training.training
    if recipe.seed_text is None and recipe.trains_seed:
        rows["seed_model.training"] = recipe.seed_model.training
    for where, config in rows.items():
        read = ("train", "calibration") if config.evaluation_steps else ("train",)
        counts[f"{where}.loss"] = (config.loss, everyone, read)
    if recipe.experts.continued is None:
        del counts["experts.continued.loss"]
    for setting, (count, names, parts) in counts.items():
        for name, part in product(names, parts) if count == wanted else ():
            given = getattr(recipe.domains[name], part) is not None
            text = part if given or part == "elsewhere" else "train"
            if (source := getattr(recipe.domains[name], text)) is not None:
                yield setting, f"domains.{name}.{text}", source
    if recipe.evaluation.loss == wanted:
        yield from (("evaluation.loss", f"outside.{n}", s) for n, s in recipe.outside.items())
    if recipe.seed_text is not None and recipe.seed_model.training.loss == wanted:
        yield "seed_model.training.loss", "seed_model.text", recipe.seed_text


def _response_faults(recipe: Recipe) -> Iterator[Fault]:
    for setting, field, source in responses_asked(recipe):
        if source.form != "chat":
            remedy = f"{field} holds texts, which have no responses; use all, or form: chat"
            yield Fault(setting, "responses", remedy)


def _router_faults(recipe: Recipe) -> Iterator[Fault]:
    domains = len(recipe.domains)
    for where, k in [
        ("moe.top_k", recipe.moe.top_k),
        *(("evaluation.sweep_top_k", k) for k in recipe.evaluation.sweep_top_k),
        *(("task_evaluation.sweep_top_k", k) for k in recipe.task_evaluation.sweep_top_k),
    ]:
        if k > domains >= 2:
            yield Fault(where, k, f"more than the {domains} experts; use 1 to {domains}")
    ridge_lambda = recipe.router.ridge_lambda
    if isinstance(ridge_lambda, float) and ridge_lambda < 0:
        yield Fault("router.ridge_lambda", ridge_lambda, "must not be negative; use e.g. 0.01")
    weights = recipe.router.domain_weights
    yield from domain_faults("router.domain_weights", weights, recipe)
    for name, weight in weights.items():
        if not weight > 0:  # nor where it is no number
            remedy = "must be above 0; leave the domain out instead, or use a small weight"
            yield Fault(f"router.domain_weights.{name}", weight, remedy)


def _bound_faults(recipe: Recipe) -> Iterator[Fault]:
    """Numbers in lists, which the bounds of their fields do not reach."""
    evaluation, tasks = recipe.evaluation, recipe.task_evaluation
    least: dict[str, tuple[Sequence[float], int]] = {
        "statistics.position_buckets": (recipe.statistics.position_buckets, 1),
        "router.lambda_grid": (recipe.router.lambda_grid, 0),
        "evaluation.sweep_top_k": (evaluation.sweep_top_k, 1),
        "evaluation.sweep_ridge_lambda": (evaluation.sweep_ridge_lambda, 0),
        "task_evaluation.sweep_top_k": (tasks.sweep_top_k, 1),
        "task_evaluation.sweep_ridge_lambda": (tasks.sweep_ridge_lambda, 0),
    }
    for where, (values, bound) in least.items():
        for value in (value for value in values if value < bound):
            yield Fault(where, value, f"use {bound} or more")
    seeds = {
        "evaluation.random_routing_seeds": evaluation.random_routing_seeds,
        "task_evaluation.seeds": tasks.seeds,
    }
    once: dict[str, Sequence[object]] = {where: values for where, (values, _) in least.items()}
    once |= {where: chosen or () for where, chosen in seeds.items()}
    once["backbone.experts"] = recipe.backbone.experts or ()
    for where, given in once.items():
        if repeated := [value for value, count in Counter(given).items() if count > 1]:
            yield Fault(where, repeated, "named more than once; give each once")
    for where, chosen in seeds.items():
        if chosen is None:
            continue
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
    key, most = _counted_positions(recipe)
    for where in ("evaluation", "task_evaluation"):
        for window in getattr(recipe, where).sweep_window:
            if window > most:
                remedy = f"only {most} tokens of a paragraph are counted; use at most {key} = "
                yield Fault(f"{where}.sweep_window", window, f"{remedy}{most}, or raise that")
            elif window not in buckets:
                remedy = f"its statistics are not kept; use one of {list(buckets)} or add it to "
                remedy += "statistics.position_buckets"
                yield Fault(f"{where}.sweep_window", window, remedy)


def _counted_positions(recipe: Recipe) -> tuple[str, int]:
    """The key that says how many tokens of a paragraph are counted at most, and how many."""
    length, window = recipe.statistics.sequence_length, recipe.statistics.window
    if window is not None and window < length:
        return "statistics.window", window
    return "statistics.sequence_length", length


def _task_faults(recipe: Recipe) -> Iterator[Fault]:
    for name, task in recipe.tasks.items():
        where = f"tasks.{name}"
        given = [kind for kind in KINDS if getattr(task, kind) is not None]
        if len(given) != 1:
            yield Fault(where, given, f"give exactly one of {', '.join(KINDS)}")
        if task.heldout is not None and task.domain is None:
            remedy = f"name the domain whose held-out text is read: one of {list(recipe.domains)}"
            yield Fault(f"{where}.domain", None, remedy)
        if task.domain is not None:
            yield from domain_faults(f"{where}.domain", [task.domain], recipe)


def _compute_faults(recipe: Recipe) -> Iterator[Fault]:
    """What would be reserved and stay idle, and what Ray does not take."""
    for field in fields(recipe.compute):
        asked = getattr(recipe.compute, field.name)
        if isinstance(asked, Resources):
            yield from _idle_faults(f"compute.{field.name}", asked, field.name in ON_THE_CPU)
            yield from _reserved_faults(f"compute.{field.name}", asked)


def _idle_faults(where: str, asked: Resources, on_the_cpu: bool) -> Iterator[Fault]:
    if on_the_cpu:
        given = {"gpus": asked.gpus, "accelerator": asked.accelerator}
        for name, value in given.items():
            if value:
                yield Fault(f"{where}.{name}", value, "computes on the CPU alone; remove it")
    elif asked.accelerator is not None and not asked.gpus:
        remedy = f"a kind of GPU, and no GPU is asked for; set {where}.gpus, or remove it"
        yield Fault(f"{where}.accelerator", asked.accelerator, remedy)
    divides = where == "compute.task_evaluation"
    if divides and asked.gpus > 1 and asked.gpus != int(asked.gpus):
        remedy = f"Ray reserves a share of one, or whole ones; use {ceil(asked.gpus)}"
        yield Fault(f"{where}.gpus", asked.gpus, remedy)
    elif asked.gpus > 1 and not divides and not on_the_cpu:
        remedy = "a piece computes on one GPU, and the others would be idle; use 1"
        if where == "compute.evaluation":
            remedy += ", and to divide a model that is scored on tasks "
            remedy += f"compute.task_evaluation.gpus: {ceil(asked.gpus)}"
        if isinstance(asked, WorkerResources):
            remedy += f", and for a training on several {where}.workers: {ceil(asked.gpus)}"
        yield Fault(f"{where}.gpus", asked.gpus, remedy)


def _reserved_faults(where: str, asked: Resources) -> Iterator[Fault]:
    if asked.memory is not None and asked.memory < LEAST_MEMORY:
        remedy = "is in bytes, and no piece begins with so few; write them out, as 24_000_000_000"
        yield Fault(f"{where}.memory", asked.memory, remedy)
    amounts: dict[str, float] = {}
    for name, amount in asked.resources.items():
        if own := OWN_KEYS.get(name.partition(":")[0]):
            remedy = f"has a key of its own; use {where}.{own}"
            yield Fault(f"{where}.resources.{name}", amount, remedy)
        else:
            amounts[f"resources.{name}"] = amount
    for name, amount in amounts.items():
        if amount <= 0:
            remedy = "must be more than 0; raise it, or remove it"
            yield Fault(f"{where}.{name}", amount, remedy)
        elif amount > 1 and amount != int(amount):
            remedy = f"Ray reserves a share of one, or whole ones; use {int(amount)} or "
            yield Fault(f"{where}.{name}", amount, f"{remedy}{int(amount) + 1}")
