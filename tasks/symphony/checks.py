"""What is wrong in a recipe that joins models of different origin, without reading any file."""

from collections.abc import Iterator, Mapping

from infra.recipe.checks import domain_faults, warmup_faults
from infra.recipe.schema import Recipe
from tasks.dume.checks import router_faults
from tasks.symphony.variants import (
    SYMPHONY,
    anchor_of,
    section,
    solves_routers,
    trains_shape,
    variants,
)
from upcycle_core.corpora.config import Domain
from upcycle_core.errors import Fault
from upcycle_core.symphony.checks import solver_faults
from upcycle_core.symphony.config import SymphonyConfig
from upcycle_core.training.checks import objective_faults, training_faults, weight_faults

METHODS = ("symphony", "btx", "bam", "drop-upcycling", "full-finetune")
"""Rows that can begin with models that share no seed; the last is the dense anchor, trained."""


def symphony_faults(recipe: Recipe) -> Iterator[Fault]:
    """Every fault of the fields that Symphony-MoE adds."""
    if recipe.symphony is None:
        remedy = "says how models of different origin are joined; add it, {} for the defaults"
        yield Fault("symphony", None, remedy)
    if recipe.compression is not None:
        yield Fault("compression", "given", "experts that share no seed share no base; remove it")
    if recipe.backbone.experts is not None:
        remedy = "the backbones of all symphony.models are merged: name those there, or remove it"
        yield Fault("backbone.experts", list(recipe.backbone.experts), remedy)
    for name, domain in recipe.domains.items():
        yield from _origin_faults(recipe, name, domain)
    for name, variant in variants(recipe).items():
        where = "symphony" if name == SYMPHONY else f"baselines.{name}.symphony"
        yield from _variant_faults(recipe, variant, where)
    if solves_routers(recipe):
        yield from _router_faults(recipe)
    yield from _vocabulary_faults(recipe)
    for name, row in recipe.baselines.items():
        if row.method not in METHODS:
            remedy = f"begins with one seed, and these models have none; use one of {METHODS}"
            yield Fault(f"baselines.{name}.method", row.method, remedy)
        if row.method == "drop-upcycling" and row.start == "seed":
            remedy = "these models have no seed; use start: experts"
            yield Fault(f"baselines.{name}.start", row.start, remedy)
        if row.seed_expert:
            remedy = "these models have no seed; remove it"
            yield Fault(f"baselines.{name}.seed_expert", True, remedy)
    if recipe.seed_model.model is not None:
        remedy = "these models share no seed; name it as a domain's origin.model, or remove it"
        yield Fault("seed_model.model", recipe.seed_model.model, remedy)
    method = recipe.experts.training.method
    if method != "full" and trains_shape(recipe):
        remedy = "models with random weights are trained whole: use full, or give origin.model"
        yield Fault("experts.training.method", method, remedy)
    yield from _post_training_faults(recipe)
    for name in recipe.outside:
        if name in recipe.domains:
            yield Fault(f"outside.{name}", name, "is a domain as well; rename one")


def unused_faults(recipe: Recipe) -> Iterator[Fault]:
    """Fields that say nothing without Symphony-MoE."""
    remedy = "is for models that share no seed; add a `symphony` section, or remove it"
    for name, domain in recipe.domains.items():
        if domain.origin is not None:
            yield Fault(f"domains.{name}.origin", domain.origin, remedy)
    for field in ("post_training", "similarity"):
        if getattr(recipe, field) is not None:
            yield Fault(field, "given", remedy)
    for name in recipe.outside:
        yield Fault(f"outside.{name}", "given", remedy)
    for name, row in recipe.baselines.items():
        if row.method == SYMPHONY:
            yield Fault(f"baselines.{name}.method", row.method, remedy)


def _origin_faults(recipe: Recipe, name: str, domain: Domain) -> Iterator[Fault]:
    where, origin = f"domains.{name}", domain.origin
    if domain.elsewhere is not None:
        remedy = "is read for DUME's second router alone; remove it"
        yield Fault(f"{where}.elsewhere", "given", remedy)
    if origin is None:
        return
    if domain.expert is not None:
        yield Fault(f"{where}.origin", domain.expert, "the domain has a ready expert; remove one")
    if origin.model is not None:
        given = {"initialisation": origin.initialisation, "vocabulary_size": origin.vocabulary_size}
        for field, value in given.items():
            if value is not None:
                remedy = "the model brings its own; remove it, or the model"
                yield Fault(f"{where}.origin.{field}", value, remedy)
    for other, share in origin.mixture.items():
        yield from domain_faults(f"{where}.origin.mixture", [other], recipe)
        if other in recipe.domains and recipe.domains[other].train is None and share:
            remedy = f"domains.{other} has no training text; give it some, or remove the share"
            yield Fault(f"{where}.origin.mixture.{other}", share, remedy)
        if share < 0:
            yield Fault(f"{where}.origin.mixture.{other}", share, "must not be negative")
    if origin.mixture and not any(share > 0 for share in origin.mixture.values()):
        yield Fault(f"{where}.origin.mixture", dict(origin.mixture), "one must be more than 0")


def _variant_faults(recipe: Recipe, config: SymphonyConfig, where: str) -> Iterator[Fault]:
    chosen, texts = config.models or tuple(recipe.domains), config.calibration.domains
    named: Mapping[str, tuple[str, ...]] = {
        "models": config.models or (),
        "anchor": (config.anchor,) if config.anchor else (),
        "segmentation": (config.segmentation,) if config.segmentation else (),
        "merge.weights": tuple(config.merge.weights),
        "calibration.domains": () if texts == "anchor" else texts or (),
    }
    for field, names in named.items():
        yield from domain_faults(f"{where}.{field}", names, recipe)
    if len(chosen) != len(set(chosen)) or len(chosen) < 2:
        yield Fault(f"{where}.models", list(chosen), "name two models or more, each once")
    for field, value in (("anchor", config.anchor), ("segmentation", config.segmentation)):
        if value is not None and value in recipe.domains and value not in chosen:
            remedy = f"is not among {where}.models; use one of {list(chosen)}"
            yield Fault(f"{where}.{field}", value, remedy)
    if texts is not None and not texts:
        yield Fault(f"{where}.calibration.domains", [], "no text at all; name a domain")
    yield from weight_faults(config.merge.weights, chosen, f"{where}.merge.weights")
    if config.alignment.neurons != "none":
        yield from solver_faults(config.alignment.solver, f"{where}.alignment.solver")
    if where != SYMPHONY and config.segmentation not in (None, section(recipe).segmentation):
        remedy = "all rows share one tokenizer; say it in symphony.segmentation"
        yield Fault(f"{where}.segmentation", config.segmentation, remedy)
    if where != SYMPHONY and config.rope == "anchor" != section(recipe).rope:
        remedy = "all rows share the models as they are brought in; say it in symphony.rope"
        yield Fault(f"{where}.rope", config.rope, remedy)
    ruling = recipe.domains.get(anchor_of(recipe, config))
    if config.rope == "anchor" and ruling is not None and not is_given(ruling):
        remedy = "the anchor is trained here, and brings no rope; use same, or another anchor"
        yield Fault(f"{where}.rope", "anchor", remedy)
    if where == SYMPHONY and recipe.moe.top_k > len(chosen):
        remedy = f"there are {len(chosen)} experts, {where}.models; use as many at most"
        yield Fault("moe.top_k", recipe.moe.top_k, remedy)
    if config.router == "ridge" and len(chosen) < len(recipe.domains):
        remedy = "a ridge router has one expert a domain; use random, or all models"
        yield Fault(f"{where}.router", config.router, remedy)


def _router_faults(recipe: Recipe) -> Iterator[Fault]:
    """What the ridge regression behind routers cannot do here."""
    yield from router_faults(recipe)
    if recipe.router.solve == "sequential":
        remedy = "routers of joined strangers are solved for all layers at once: use joint"
        yield Fault("router.solve", recipe.router.solve, remedy)


def is_given(domain: Domain) -> bool:
    """Whether a domain's model is there already, at least to begin with."""
    return domain.expert is not None or (
        domain.origin is not None and domain.origin.model is not None
    )


def _vocabulary_faults(recipe: Recipe) -> Iterator[Fault]:
    """Tokenizers that will cut text by different rules: of several that are trained here, or one of
    a domain's own beside a given model's. Given ones are compared where they lie."""
    if section(recipe).segmentation is not None:
        return
    kinds, is_own = set(), False
    for name, domain in recipe.domains.items():
        if is_given(domain):
            continue
        origin = domain.origin
        own = origin is not None and origin.vocabulary_size is not None
        mixture = tuple(sorted((origin.mixture or {name: 1.0}).items())) if own and origin else ()
        kinds.add((origin.vocabulary_size if origin else None, mixture))
        is_own |= own
    if len(kinds) > 1 or (is_own and any(map(is_given, recipe.domains.values()))):
        remedy = "the models cut text by different rules; name the domain whose tokenizer the "
        remedy += f"result uses: one of {list(recipe.domains)}"
        yield Fault("symphony.segmentation", None, remedy)


def _post_training_faults(recipe: Recipe) -> Iterator[Fault]:
    post, where = recipe.post_training, "post_training"
    if post is None:
        return
    yield from training_faults(post.training, f"{where}.training")
    yield from objective_faults(post.objective, f"{where}.objective")
    yield from warmup_faults(f"{where}.training", post.training)
    if "shared_base" in post.objective.trainable:
        remedy = "experts of strangers have no shared base; remove it"
        yield Fault(f"{where}.objective.trainable", "shared_base", remedy)
    if recipe.moe.top_k == 1 and {"router", "all"} & set(post.objective.trainable):
        remedy = "a renormalised top-1 weight is always 1, so the text's loss gives the router no "
        remedy += "gradient; use moe.top_k >= 2 (the paper's 2)"
        yield Fault("moe.top_k", 1, remedy)
    weights, weighted = post.objective.domain_weights, f"{where}.objective.domain_weights"
    yield from domain_faults(weighted, weights, recipe)
    yield from weight_faults(weights, recipe.domains, weighted)
    without = [name for name, domain in recipe.domains.items() if domain.train is None]
    if without:
        remedy = f"is done on all domains, and {without} have no training text"
        yield Fault(where, "given", remedy)
    accumulated, workers = post.training.gradient_accumulation, recipe.compute.post_training.workers
    if accumulated % workers:
        remedy = f"must be a multiple of compute.post_training.workers = {workers}"
        yield Fault(f"{where}.training.gradient_accumulation", accumulated, remedy)
