"""Faults of a baseline's settings across fields, found without importing torch or reading files."""

from collections.abc import Collection, Iterator

from upcycle_core.baselines.config import Baseline
from upcycle_core.errors import Fault
from upcycle_core.training.checks import objective_faults, weight_faults


def baseline_faults(
    baseline: Baseline, domains: Collection[str], field: str, *, normalise: bool = True
) -> Iterator[Fault]:
    """What does not fit in ``baseline``, which the recipe gave at ``field``.

    Args:
        baseline: The settings.
        domains: The recipe's domains.
        field: Where the recipe gave it.
        normalise: Whether DUME's weights of a token's k experts sum to one.
    """
    method, experts = baseline.method, baseline.experts(len(domains))
    if experts and baseline.top_k > experts:
        remedy = f"more than the {experts} experts; use 1 to {experts}"
        yield Fault(f"{field}.top_k", baseline.top_k, remedy)
    if experts and baseline.top_k == 1 and _renormalises(baseline, normalise):
        yield from _router_faults(baseline, f"{field}.top_k")
    if method == "ders" and baseline.ders is None:
        remedy = "say what the experts are made of, e.g. {codec: low_rank, rank: 4}"
        yield Fault(f"{field}.ders", None, remedy)
    for name in ("symphony", "ders", "simoe"):
        if getattr(baseline, name) is not None and name != method:
            yield Fault(f"{field}.{name}", "given", f"says nothing for {method}; remove it")
    if baseline.ders is not None:
        yield from baseline.ders.faults(f"{field}.ders")
    if method != "ders" and "shared_base" in baseline.objective.trainable:
        remedy = f"{method} has no shared base; remove it"
        yield Fault(f"{field}.objective.trainable", "shared_base", remedy)
    yield from _of_others(baseline, field)
    if method == "full-finetune" and tuple(baseline.objective.trainable) != ("all",):
        remedy = "a dense model is trained whole; use [all]"
        yield Fault(f"{field}.objective.trainable", list(baseline.objective.trainable), remedy)
    if baseline.tuned != "full" and baseline.training.evaluation_steps is not None:
        remedy = f"a model that is tuned in part ({baseline.tuned}) is not validated; remove it"
        where = f"{field}.training.evaluation_steps"
        yield Fault(where, baseline.training.evaluation_steps, remedy)
    if baseline.tuned != "full" and method != "full-finetune":
        remedy = f"is for full-finetune; {method} trains what objective.trainable says: remove it"
        yield Fault(f"{field}.tuned", baseline.tuned, remedy)
    if baseline.lora is not None and baseline.tuned != "lora":
        remedy = f"is only trained with tuned: lora, and tuned is {baseline.tuned}; set it"
        yield Fault(f"{field}.lora", f"rank {baseline.lora.rank}", remedy)
    for name in ("balance_coefficient", "z_coefficient"):
        if not experts and getattr(baseline.objective, name):
            remedy = f"{method} has no routers; set it to 0"
            yield Fault(f"{field}.objective.{name}", getattr(baseline.objective, name), remedy)
    yield from objective_faults(baseline.objective, f"{field}.objective")
    for name in baseline.objective.domain_weights:
        if name not in domains:
            remedy = f"not a domain; the domains are {sorted(domains)}"
            yield Fault(f"{field}.objective.domain_weights", name, remedy)
    weights = baseline.objective.domain_weights
    yield from weight_faults(weights, domains, f"{field}.objective.domain_weights")


def _of_others(baseline: Baseline, field: str) -> Iterator[Fault]:
    """Settings of how experts begin that other methods have."""
    method, experts = baseline.method, baseline.experts(1)
    if baseline.seed_expert and method not in ("btx", "bam"):
        yield Fault(f"{field}.seed_expert", True, f"{method} has no such expert; btx and bam have")
    if baseline.copies and not (experts and not baseline.uses_experts):
        remedy = f"{method} copies no FFN here; remove it"
        yield Fault(f"{field}.copies", baseline.copies, remedy)
    if baseline.start == "experts" and method != "drop-upcycling":
        yield Fault(f"{field}.start", "experts", f"is for drop-upcycling; {method} has its own")
    if baseline.reinitialised != Baseline.reinitialised and method != "drop-upcycling":
        remedy = f"is for drop-upcycling; {method} draws nothing anew: remove it"
        yield Fault(f"{field}.reinitialised", baseline.reinitialised, remedy)


def _router_faults(baseline: Baseline, field: str) -> Iterator[Fault]:
    """A router that is trained where one expert always weighs 1."""
    if {"router", "all"} & set(baseline.objective.trainable):
        remedy = "a renormalised top-1 weight is always 1, so the text's loss gives the router no "
        remedy += "gradient; use top_k >= 2, or objective.trainable: [experts, backbone]"
        yield Fault(field, baseline.top_k, remedy)


def _renormalises(baseline: Baseline, normalise: bool) -> bool:
    """Whether the k experts' weights are made to sum to one, with nothing beside them."""
    if baseline.method == "dume":
        return normalise
    if baseline.ders is None:
        return True
    return baseline.ders.combine == "normalised" and baseline.ders.universal == "none"
